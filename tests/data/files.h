// IDX files and compressed ones for the tests of this room.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "support/folder.h"
#include "support/thrown.h"

namespace lockstep::test {

// `bytes` as gzip packs them.
inline std::string gzip(const std::string& bytes) {
  const Folder folder;
  write(folder / "x", bytes);
  EXPECT_EQ(std::system(("gzip -n " + folder / "x").c_str()), 0);
  return contents(folder / "x.gz");
}

// The bytes of an IDX file of unsigned bytes.
inline std::string idx(const std::vector<uint32_t>& sizes, const std::string& elements) {
  std::string bytes{'\0', '\0', '\x08', static_cast<char>(sizes.size())};
  for (const uint32_t size : sizes) {
    for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(size >> shift);
  }
  return bytes + elements;
}

}  // namespace lockstep::test
