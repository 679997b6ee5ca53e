// Where shared libraries are.
#pragma once

#include <filesystem>

namespace lockstep::comm {

// The folder that this process's libtorch_cpu.so was loaded from.
std::filesystem::path libtorch_folder();

}  // namespace lockstep::comm
