// The names of functions in programs and libraries.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lockstep::launch {

// Up to `size` bytes of a file from `offset`; fewer at its end.
using ReadAt = std::function<std::string(uint64_t offset, uint64_t size)>;

// For each address, as in the symbol table of an ELF file, the function that it lies in as people
// write it, "lockstep::comm::Work::wait()"; empty where the file does not say. Any bytes may be
// read: what does not fit together is taken for no symbol table.
std::vector<std::string> functions_at(const ReadAt& read, const std::vector<uint64_t>& addresses);

// The same of a file; all empty when it cannot be read.
std::vector<std::string> functions_at(const std::string& path,
                                      const std::vector<uint64_t>& addresses);

}  // namespace lockstep::launch
