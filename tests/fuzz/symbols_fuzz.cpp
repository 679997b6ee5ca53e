// Any bytes as a program's file: a name or none for each address, nothing else.
#include <cstdlib>
#include <string>

#include "launch/diagnosis/symbols.h"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, size_t size) {
  const std::string elf(reinterpret_cast<const char*>(data), size);
  const lockstep::launch::ReadAt read = [&elf](uint64_t offset, uint64_t count) {
    return offset < elf.size() ? elf.substr(offset, count) : std::string();
  };
  if (lockstep::launch::functions_at(read, {0, 0x1000, ~uint64_t{0}}).size() != 3) std::abort();
  return 0;
}
