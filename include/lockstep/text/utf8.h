// Bytes that are to be shown.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/core/compiler.h"

namespace lockstep::text {

// The text with U+FFFD in the place of each byte that is not UTF-8, as a model that has not learnt
// much may write them.
std::string valid_utf8(std::string_view text);

}  // namespace lockstep::text
