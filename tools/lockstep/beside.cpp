#include "beside.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "launch/job/run.h"

namespace lockstep::tool {

std::string program_beside(const std::string& name, const std::string& tag) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto program = self.parent_path() / name;
  if (access(program.c_str(), X_OK) != 0) {
    throw launch::StartError(
        fmt::format("[{}] {} cannot be executed: {}; it is built and installed together with "
                    "lockstep, where libtorch is",
                    tag, program.string(), std::strerror(errno)),
        127);
  }
  return program.string();
}

}  // namespace lockstep::tool
