// PyPI's `tokenizers`, which ours are compared with.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "support/folder.h"
#include "text/files.h"

namespace lockstep::test {

inline void peer(const std::vector<std::string>& arguments) {
  const std::string command =
      fmt::format("cd {} && {} tests/text/peer.py '{}'", LOCKSTEP_SOURCE_DIR, LOCKSTEP_PEERS_PYTHON,
                  fmt::join(arguments, "' '"));
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
}

// Qwen's own, from the package that deps/qwen.txt names.
inline std::string qwen_ranks() {
  return LOCKSTEP_SOURCE_DIR "/.deps/qwen/dashscope/resources/qwen.tiktoken";
}

inline std::vector<int32_t> ids_in(const std::string& path) {
  const std::string bytes = text::read_file(path);
  std::vector<int32_t> ids(bytes.size() / 4);
  std::memcpy(ids.data(), bytes.data(), bytes.size());
  return ids;
}

}  // namespace lockstep::test
