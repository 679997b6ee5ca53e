#include "core/files/whole_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "core/files/fd.h"

namespace lockstep {
namespace {

// As open(2) opens a file that is there: it stays its owner's, with its rights. Only root gives one
// to another user, and some file systems have no rights: then the new file has those it has.
void take_over_rights(int fd, const struct stat& old) {
  static_cast<void>(fchown(fd, old.st_uid, old.st_gid) == 0 || fchown(fd, -1, old.st_gid) == 0);
  static_cast<void>(fchmod(fd, old.st_mode & 0777));
}

// `like`: a file whose rights the new one gets, if it is there.
int write_all(const std::string& path, int flags, std::string_view bytes,
              const std::string& like = {}) {
  struct stat old;
  const bool is_new = like.empty() || stat(like.c_str(), &old) != 0;
  // Not for an instant may others read what replaces a file that they may not.
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC | flags, is_new ? 0666 : 0600);
  if (fd < 0) return errno;
  if (!is_new) take_over_rights(fd, old);
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

// Where open(2) would make or find the file: the end of a chain of links, also of one that leads
// nowhere yet; where they lead in a circle, the first, which is replaced.
std::string followed(const std::string& path) {
  constexpr int kMostLinks = 40;  // the kernel's limit
  std::filesystem::path target = path;
  for (int links = 0; links <= kMostLinks; ++links) {
    std::error_code none;
    const auto next = std::filesystem::read_symlink(target, none);
    if (none) return target.string();
    target = target.parent_path() / next;  // `next` alone, where it is absolute
  }
  return path;
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
  if (std::filesystem::is_directory(path, none)) return EISDIR;
  const std::string target = followed(path);
  const std::string unfinished = fmt::format("{}.{}", target, getpid());
  int error = write_all(unfinished, O_CREAT | O_TRUNC, bytes, target);
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
