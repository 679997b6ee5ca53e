// What a .npy file's header says. Free of torch, for the fuzzer's sake.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data {

struct NpyHeader {
  char kind = 0;  // as NumPy's: b, i, u, f, c
  int64_t element_bytes = 0;
  bool swapped = false;  // bytes are big-endian
  bool fortran = false;  // the first dimension is the fastest
  std::vector<int64_t> sizes;
  int64_t elements = 0;
  size_t begin = 0;  // of the elements
};

// Of a whole file. Throws DataError that begins with "[npy]" and `name`.
NpyHeader parse_npy(std::string_view bytes, const std::string& name);

}  // namespace lockstep::data
