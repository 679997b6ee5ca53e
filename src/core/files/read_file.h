// A whole file.
#pragma once

#include <string>
#include <string_view>

namespace lockstep {

// What is in it. Throws ConfigError, "`about`: why", followed by `cure`; a directory is an
// error, an empty file is none.
std::string read_file(const std::string& path, std::string_view about, std::string_view cure = "");

// Whether something is there, or cannot be looked at: then reading it says why.
bool may_exist(const std::string& path);

}  // namespace lockstep
