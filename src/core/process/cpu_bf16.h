// Whether this processor multiplies bfloat16.
#pragma once

#include <string>

namespace lockstep {

// What multiplies it ("AMX"); empty when nothing does.
std::string native_bf16_cpu();

}  // namespace lockstep
