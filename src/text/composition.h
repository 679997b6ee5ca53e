// Canonical decomposition and composition, section 3.11 of the Unicode standard.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep::text {

// The codes in normalization form C.
std::vector<uint32_t> composed(const std::vector<uint32_t>& codes);

// Calls visit(code) for each code that composed() may change, or that may change what stands before
// it: what is decomposed for good, is the second part of a composition, or is a mark with a class.
void for_each_unstable(const std::function<void(uint32_t)>& visit);

}  // namespace lockstep::text
