// The version of the library, which the project's CMakeLists.txt states.
#pragma once

#include <string_view>

namespace lockstep {

// "0.1.0".
std::string_view version() noexcept;

}  // namespace lockstep
