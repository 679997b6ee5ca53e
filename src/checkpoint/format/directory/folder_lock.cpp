#include "checkpoint/format/directory/folder_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/format/directory/names.h"
#include "core/network/address.h"
#include "core/process/stat.h"
#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {
namespace {

// A process that was killed may take as long to close its files when the machine is busy, and one
// that mends `latest` to bring it to the disk.
constexpr std::chrono::seconds kEnding(10);
constexpr std::chrono::milliseconds kLook(10);
// What follows the name of a process that writes nothing else.
constexpr std::string_view kMends = " (to replace latest)";
constexpr const char* kCheckpointsCure =
    "writes checkpoints here already: give this job another directory, or end that one";
constexpr const char* kOwnCheckpointsCure =
    "writes checkpoints here already, and is this process: another Checkpointer of it holds the "
    "directory. Destroy that one first, or give this one another directory";

std::string name_of_process(pid_t pid) { return fmt::format("process {} on {}", pid, host_name()); }

// What the holder of a lock has written into its file.
std::string holder_of(int lock) {
  std::string holder(256, '\0');
  const ssize_t count = ::pread(lock, holder.data(), holder.size(), 0);
  holder.resize(count > 0 ? count : 0);
  while (!holder.empty() && holder.back() == '\n') holder.pop_back();
  return holder;
}

// Whether that is a process of this host that is ending, such as one of a job that was just killed.
bool is_ending(const std::string& holder) {
  pid_t pid = 0;
  if (std::sscanf(holder.c_str(), "process %d on ", &pid) != 1 || holder != name_of_process(pid)) {
    return false;
  }
  const auto stat = process_stat(pid);
  return !stat || stat->is_ending();
}

int locked(const std::string& folder, std::string_view name, const std::string& about,
           const std::string& cure, FileSystem& files, Locker who = Locker::Writer) {
  const std::string path = fmt::format("{}/{}", folder, name);
  int fd = files.open(path, O_RDWR | O_CREAT | O_NOFOLLOW);
  if (fd < 0) throw_system_error(path, "cannot be opened");
  const auto fail = [&](const std::string& what) {
    files.close(std::exchange(fd, -1));
    throw CheckpointError(what);
  };
  const auto deadline = std::chrono::steady_clock::now() + kEnding;
  std::optional<std::string> before;
  while (files.lock(fd) != 0) {
    const int error = errno;
    if (error != EWOULDBLOCK) {
      fail(
          fmt::format("[checkpoint] {}: cannot be locked: {}. The file system has to support "
                      "flock()",
                      path, std::generic_category().message(error)));
    }
    const std::string holder = holder_of(fd);
    // Who has had it for a moment only may not have written its name yet.
    const bool may_go = is_ending(holder) || holder.ends_with(kMends) || holder != before;
    before = holder;
    if (may_go && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kLook);
      continue;
    }
    const bool is_own = name == kLockName && holder == name_of_process(getpid());
    fail(fmt::format("{}: {} {}", about, holder.empty() ? "another process" : holder,
                     is_own ? kOwnCheckpointsCure : cure));
  }
  // Who holds it is for people, and for who waits: the lock is the kernel's, and gone with its
  // holder. Over NFS the others see what is on the disk.
  const bool mends = who == Locker::Mender;
  const std::string holder = fmt::format("{}{}\n", name_of_process(getpid()), mends ? kMends : "");
  if (::ftruncate(fd, 0) != 0 || files.write(fd, holder.data(), holder.size()) < 0 ||
      (mends && files.fsync(fd) != 0)) {
    const int error = errno;
    fail(fmt::format("[checkpoint] {}: cannot be written: {}", path,
                     std::generic_category().message(error)));
  }
  return fd;
}

// This process's locks of folders of checkpoints, and the descriptors of Directories that use them.
struct Lent {
  int own, lent;
};
std::mutex locks_mutex;
std::vector<Lent> locks;

bool is_same_file(int fd, const std::string& path) {
  struct stat one = {}, other = {};
  return ::fstat(fd, &one) == 0 && ::lstat(path.c_str(), &other) == 0 &&
         one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

}  // namespace

FolderLock::FolderLock(const std::string& folder, std::string_view name, const std::string& about,
                       const std::string& cure, FileSystem& files)
    : fd_(-1), files_(&files) {
  const std::string plain = without_end_slash(folder);
  make_directories(files, plain);
  fd_ = locked(plain, name, about, cure, files);
}

FolderLock::~FolderLock() {
  if (fd_ < 0) return;
  const std::lock_guard guard(locks_mutex);
  std::erase_if(locks, [this](const Lent& one) { return one.own == fd_; });
  files_->close(fd_);
}

FolderLock::FolderLock(FolderLock&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), files_(other.files_) {}

FolderLock FolderLock::of_checkpoints(const std::string& folder, FileSystem& files) {
  const std::string plain = without_end_slash(folder);
  FolderLock lock(plain, kLockName, "[checkpoint] " + plain, kCheckpointsCure, files);
  const std::lock_guard guard(locks_mutex);
  locks.push_back({lock.fd_, -1});
  return lock;
}

int lock_checkpoints(const std::string& folder, FileSystem& files, Locker who) {
  {
    const std::lock_guard guard(locks_mutex);
    for (auto& [own, lent] : locks) {
      if (lent >= 0 || !is_same_file(own, fmt::format("{}/{}", folder, kLockName))) continue;
      // The lock belongs to what both descriptors stand for, and is gone with the last of them.
      lent = ::fcntl(own, F_DUPFD_CLOEXEC, 0);
      if (lent < 0) throw_system_error(folder, "cannot be locked");
      return lent;
    }
  }
  return locked(folder, kLockName, "[checkpoint] " + folder, kCheckpointsCure, files, who);
}

void unlock_checkpoints(int fd, FileSystem& files) noexcept {
  const std::lock_guard guard(locks_mutex);
  for (auto& one : locks) {
    if (one.lent == fd) one.lent = -1;
  }
  files.close(fd);
}

void check_lock(int fd, const std::string& folder) {
  if (is_same_file(fd, fmt::format("{}/{}", folder, kLockName))) return;
  throw CheckpointError(
      fmt::format("[checkpoint] {}: was removed or replaced while this run was saving into it: {} "
                  "there is not the file that it has locked, and another job may write there. "
                  "Start this run again, or give it another directory",
                  folder, kLockName));
}

std::string without_end_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

void make_directories(FileSystem& files, const std::string& path) {
  if (files.make_directory(path) != 0) {
    if (errno == EEXIST) return;
    const size_t slash = path.find_last_of('/');
    if (errno != ENOENT || slash == std::string::npos || slash == 0) {
      throw_system_error(path, "cannot be made");
    }
    make_directories(files, path.substr(0, slash));
    if (files.make_directory(path) != 0 && errno != EEXIST) {
      throw_system_error(path, "cannot be made");
    }
  }
  const size_t slash = path.find_last_of('/');
  sync_directory(files, slash == std::string::npos ? "."
                        : slash == 0               ? "/"
                                                   : path.substr(0, slash));
}

}  // namespace lockstep::checkpoint
