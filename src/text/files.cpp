#include "text/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/files/fd.h"
#include "core/files/whole_file.h"
#include "lockstep/core/error.h"

namespace lockstep::text {
namespace {

[[noreturn]] void throw_system_error(const std::string& path, std::string_view what) {
  throw DataError(fmt::format("[text] {}: {}: {}", path, what, std::strerror(errno)));
}

}  // namespace

std::string read_file(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) throw_system_error(path, "cannot be opened");
  std::string bytes;
  for (;;) {
    const size_t have = bytes.size();
    bytes.resize(have + (1 << 20));
    const ssize_t n = ::read(fd.get(), bytes.data() + have, 1 << 20);
    bytes.resize(have + static_cast<size_t>(n > 0 ? n : 0));
    if (n < 0 && errno != EINTR) throw_system_error(path, "cannot be read");
    if (n == 0) return bytes;
  }
}

void write_file(const std::string& path, std::string_view bytes) {
  const std::string draft = fmt::format("{}.{}.tmp", path, ::getpid());
  Fd fd(::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!fd) throw_system_error(draft, "cannot be created");
  const auto fail = [&](const std::string& name, std::string_view what) {
    const int error = errno;
    ::unlink(draft.c_str());
    errno = error;
    throw_system_error(name, what);
  };
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd.get(), bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(draft, "cannot be written");
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  if (::fsync(fd.get()) != 0) fail(draft, "cannot be written");
  fd.reset();
  if (::rename(draft.c_str(), path.c_str()) != 0) fail(path, "cannot be renamed to");
  errno = sync_folder_of(path);
  if (errno != 0) throw_system_error(path, "its folder cannot be brought to the disk (fsync)");
}

}  // namespace lockstep::text
