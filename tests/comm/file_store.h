// A store of PyTorch's that ranks share as a file.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

namespace lockstep::test {

inline std::string new_file() {
  std::string path = testing::TempDir() + "join-XXXXXX";
  close(mkstemp(path.data()));
  return path;
}

inline c10::intrusive_ptr<::c10d::Store> file_store(const std::string& path, int ranks) {
  return c10::make_intrusive<::c10d::FileStore>(path, ranks);
}

}  // namespace lockstep::test
