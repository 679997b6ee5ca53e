// Paths that outlast a change of the working directory.
#pragma once

#include <filesystem>
#include <string>
#include <system_error>

namespace lockstep {

// The path from the root, for what keeps it until later: the program may call chdir() meanwhile.
// Empty stays empty.
inline std::string lasting_path(const std::string& path) {
  std::error_code error;
  const auto whole =
      path.empty() ? std::filesystem::path() : std::filesystem::absolute(path, error);
  return error ? path : whole.string();
}

}  // namespace lockstep
