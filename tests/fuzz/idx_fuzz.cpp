// Any bytes as an IDX file: read_idx returns an array or throws DataError, and nothing else
// happens.
//   clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -Iinclude tests/fuzz/idx_fuzz.cpp
//   src/data/idx/idx.cpp -lz -lfmt
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/data/idx.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  const int file = memfd_create("idx", 0);
  if (file < 0 || write(file, bytes, count) != static_cast<ssize_t>(count)) std::abort();
  try {
    const auto array = lockstep::data::read_idx("/proc/self/fd/" + std::to_string(file));
    int64_t elements = 1;
    for (const int64_t size : array.sizes) elements *= size;
    if (elements != static_cast<int64_t>(array.bytes.size())) std::abort();
  } catch (const lockstep::DataError&) {
  }
  close(file);
  return 0;
}
