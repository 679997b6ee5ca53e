#include "text/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/files/whole_file.h"
#include "lockstep/core/error.h"

namespace lockstep::text {
namespace {

[[noreturn]] void throw_system_error(const std::string& path, std::string_view what) {
  throw DataError(fmt::format("[text] {}: {}: {}", path, what, std::strerror(errno)));
}

}  // namespace

std::string read_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw_system_error(path, "cannot be opened");
  std::string bytes;
  for (;;) {
    const size_t have = bytes.size();
    bytes.resize(have + (1 << 20));
    const ssize_t n = ::read(fd, bytes.data() + have, 1 << 20);
    if (n < 0 && errno == EINTR) {
      bytes.resize(have);
      continue;
    }
    bytes.resize(have + static_cast<size_t>(n > 0 ? n : 0));
    if (n <= 0) {
      const int error = errno;
      ::close(fd);
      errno = error;
      if (n < 0) throw_system_error(path, "cannot be read");
      return bytes;
    }
  }
}

void write_file(const std::string& path, std::string_view bytes) {
  const std::string draft = fmt::format("{}.{}.tmp", path, ::getpid());
  const int fd = ::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) throw_system_error(draft, "cannot be created");
  const auto fail = [&](std::string_view what) {
    const int error = errno;
    ::close(fd);
    ::unlink(draft.c_str());
    errno = error;
    throw_system_error(draft, what);
  };
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("cannot be written");
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  if (::fsync(fd) != 0) fail("cannot be written");
  ::close(fd);
  if (::rename(draft.c_str(), path.c_str()) != 0) {
    const int error = errno;
    ::unlink(draft.c_str());
    errno = error;
    throw_system_error(path, "cannot be renamed to");
  }
  errno = sync_folder_of(path);
  if (errno != 0) throw_system_error(path, "its folder cannot be brought to the disk (fsync)");
}

}  // namespace lockstep::text
