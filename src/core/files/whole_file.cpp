#include "core/files/whole_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "core/files/fd.h"

namespace lockstep {
namespace {

int write_all(const std::string& path, int flags, std::string_view bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC | flags, 0666);
  if (fd < 0) return errno;
  int error = 0;
  while (!bytes.empty() && error == 0) {
    const ssize_t count = write(fd, bytes.data(), bytes.size());
    if (count >= 0) {
      bytes.remove_prefix(static_cast<size_t>(count));
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  // What a disk over the network has no room for may be said only now.
  if (close(fd) != 0 && error == 0) error = errno;
  if (error != 0 && (flags & O_CREAT) != 0) unlink(path.c_str());
  return error;
}

}  // namespace

bool is_stream(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  return std::filesystem::exists(status) && !std::filesystem::is_regular_file(status) &&
         !std::filesystem::is_directory(status);
}

int write_whole_file(const std::string& path, std::string_view bytes) {
  if (is_stream(path)) return write_all(path, 0, bytes);
  std::error_code none;
  const auto there = std::filesystem::canonical(path, none);
  const std::string target = none ? path : there.string();
  const std::string unfinished = fmt::format("{}.{}", target, getpid());
  int error = write_all(unfinished, O_CREAT | O_TRUNC, bytes);
  if (error == 0 && std::rename(unfinished.c_str(), target.c_str()) != 0) {
    error = errno;
    unlink(unfinished.c_str());
  }
  return error;
}

int write_new_file(const std::string& path, std::string_view bytes) {
  return write_all(path, O_CREAT | O_EXCL, bytes);
}

int sync_folder_of(const std::string& path) {
  const auto folder = std::filesystem::path(path).parent_path();
  const Fd fd(open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return 0;  // it may be written to, and not be read
  if (fsync(fd.get()) == 0 || errno == EINVAL || errno == EOPNOTSUPP) return 0;
  return errno;
}

void remove_whole_file(const std::string& path) {
  std::error_code ignored;
  if (is_stream(path)) return;
  if (std::filesystem::is_symlink(path, ignored)) {
    std::filesystem::resize_file(path, 0, ignored);
  } else if (std::filesystem::is_regular_file(path, ignored)) {
    std::filesystem::remove(path, ignored);
  }
}

}  // namespace lockstep
