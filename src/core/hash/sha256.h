// SHA-256, as a name of what was hashed.
#pragma once

#include <string>
#include <string_view>

namespace lockstep {

// 64 hexadecimal digits.
std::string sha256(std::string_view bytes);

}  // namespace lockstep
