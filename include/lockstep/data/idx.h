// The IDX format of MNIST's files (http://yann.lecun.com/exdb/mnist): bytes 0, 0, element type,
// number of dimensions; each dimension's size as a big-endian 32-bit number; then the elements,
// last dimension fastest.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::data {

// What a file holds.
struct IdxArray {
  std::vector<int64_t> sizes;
  std::vector<uint8_t> bytes;  // as many as the product of sizes
};

// Reads a file of unsigned bytes (element type 8) with one to four dimensions, plain or
// gzip-compressed (its contents decide, not its name). Throws DataError that names the file, what
// was expected and what was found when it is missing, unreadable, truncated, longer than it says,
// garbled, or something else. Uses no more memory than the file can really hold, even if its header
// says otherwise.
IdxArray read_idx(const std::filesystem::path& file);

}  // namespace lockstep::data
