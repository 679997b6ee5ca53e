#include "core/files/read_file.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "lockstep/core/error.h"

namespace lockstep {

std::string read_file(const std::string& path, std::string_view about, std::string_view cure) {
  const auto refuse = [&](std::string_view why) {
    throw ConfigError(fmt::format("{}: {}{}{}", about, why, cure.empty() ? "" : "; ", cure));
  };
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) refuse("it is a directory; name the file in it");
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(std::strerror(errno));
  std::ostringstream text;
  // Of an empty file nothing is taken, which is an error of the stream that takes it.
  if (file.peek() != std::ifstream::traits_type::eof()) text << file.rdbuf();
  if (file.bad() || !text) refuse("it cannot be read");
  return text.str();
}

bool may_exist(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error) || error;
}

}  // namespace lockstep
