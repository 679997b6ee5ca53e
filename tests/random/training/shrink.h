// From a program that fails to the smallest one that does.
#pragma once

#include <functional>

#include "random/training/program.h"

namespace lockstep::test::training {

// Takes away features, layers, steps and ranks as long as `fails` says that it still does. Asks at
// most `most` times.
Program shrink(Program program, const std::function<bool(const Program&)>& fails, int most);

}  // namespace lockstep::test::training
