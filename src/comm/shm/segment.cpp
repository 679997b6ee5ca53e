#include "comm/shm/segment.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <utility>

#include "core/divided_up.h"
#include "core/process/cgroup.h"
#include "lockstep/core/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace lockstep::comm {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = 2 << 20;

// The number after `key` in a file of "key number" lines.
int64_t number_in(const char* path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  int64_t value = std::numeric_limits<int64_t>::max();
  while (file >> word) {
    if (word == key && file >> value) return value;
  }
  return std::numeric_limits<int64_t>::max();
}

// Bytes that this process may still take, by the machine's, its control groups' and the process's
// own limit.
int64_t available_bytes() {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  int64_t available = number_in("/proc/meminfo", "MemAvailable:");
  if (available != kNone) available *= 1024;
  if (const auto left = group_memory_left()) available = std::min(available, *left);
  rlimit file_size{};
  if (getrlimit(RLIMIT_FSIZE, &file_size) == 0 && file_size.rlim_cur != RLIM_INFINITY) {
    available = std::min(available, static_cast<int64_t>(file_size.rlim_cur));
  }
  return available;
}

[[noreturn]] void too_little(int64_t bytes, const char* what, int error) {
  throw CommError(fmt::format(
      "[shm] {} {} bytes of shared memory: {}; {} bytes are available to this process. Use fewer "
      "ranks, a smaller model or "
      "buckets, or raise the limit (memory of the machine or container, ulimit -f, the size of "
      "/dev/shm)",
      what, bytes, error ? std::strerror(error) : "too little memory", available_bytes()));
}

// A file system may be smaller than what is available to this process, as a container's is.
void take_pages(const Fd& fd, int64_t bytes) {
  // Before Linux 6.10 a signal ends it, and what it has taken is given back: with the timer of a
  // profiler, all at once would begin anew without end.
  constexpr int64_t kPiece = 1 << 20;
  for (int64_t at = 0; at < bytes; at += kPiece) {
    int error = 0;
    do error = posix_fallocate(fd.get(), at, std::min(kPiece, bytes - at));
    while (error == EINTR);
    if (error != 0) too_little(bytes, "cannot get", error);
  }
}

}  // namespace

int64_t page_rounded(int64_t bytes) {
  const int64_t unit = bytes >= kHugePage ? kHugePage : kPage;
  return rounded_up(bytes, unit);
}

// Gives the file its size.
Segment Segment::sized(Fd fd, int64_t bytes) {
  if (!fd || ftruncate(fd.get(), bytes) != 0) too_little(bytes, "cannot get", errno);
  struct stat file {};
  fstat(fd.get(), &file);
  Segment segment = map(fd.get(), bytes);
  segment.fd_ = std::move(fd);
  segment.handle_ = {
      .bytes = bytes, .device = file.st_dev, .inode = file.st_ino, .cookie = new_cookie()};
  return segment;
}

Segment Segment::create(int64_t bytes, const std::vector<std::string>& doors) {
  // Checked first: growing a file over RLIMIT_FSIZE raises a signal, and overcommitted memory ends
  // in a kill.
  if (bytes < 0 || bytes > available_bytes()) too_little(bytes, "cannot get", 0);
  Segment segment;
  std::optional<std::string> problem;
  if (Fd fd(memfd_create("lockstep", MFD_CLOEXEC)); fd) {
    segment = sized(std::move(fd), bytes);
    for (size_t i = 0; i < doors.size() && !problem; ++i)
      problem = Door::hand_over(doors[i], segment.handle_.cookie, segment.fd_.get());
    if (!problem) return segment;
  } else {
    problem = std::strerror(errno);
  }
  // Another network namespace, or a filter of system calls: a name that they can open.
  const Cookie name = new_cookie();
  const std::string path =
      fmt::format("/dev/shm/lockstep-segment-{:016x}{:016x}", name[0], name[1]);
  Fd fd(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd) {
    throw CommError(
        fmt::format("[shm] cannot share memory: a process of this host cannot be handed a "
                    "descriptor ({}), and {} cannot be made: {}",
                    *problem, path, std::strerror(errno)));
  }
  try {
    take_pages(fd, bytes);
    segment = sized(std::move(fd), bytes);
  } catch (...) {
    unlink(path.c_str());
    throw;
  }
  std::copy(path.begin(), path.end(), segment.handle_.path);
  return segment;
}

Segment Segment::attach(const SegmentHandle& handle) {
  Fd fd;
  if (handle.path[0] != '\0') {
    const std::string path(handle.path, strnlen(handle.path, sizeof handle.path));
    fd = Fd(open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
    if (!fd) {
      throw CommError(
          fmt::format("[shm] cannot open {} to share memory: {}. Set LOCKSTEP_BACKEND=tcp", path,
                      std::strerror(errno)));
    }
  } else if (auto came = Door::own().take(handle.cookie)) {
    fd = std::move(*came);
  } else {
    throw CommError("[shm] the descriptor of shared memory has not come. Set LOCKSTEP_BACKEND=tcp");
  }
  // A file of another program is not written to.
  struct stat file {};
  if (fstat(fd.get(), &file) != 0 || file.st_dev != handle.device || file.st_ino != handle.inode ||
      file.st_size != handle.bytes) {
    throw CommError("[shm] what is to be shared memory is another file. Set LOCKSTEP_BACKEND=tcp");
  }
  return map(fd.get(), handle.bytes);
}

Segment Segment::map(int fd, int64_t bytes) {
  Segment segment;
  if (bytes == 0) return segment;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) too_little(bytes, "cannot map", errno);
  madvise(data, bytes, MADV_DONTFORK);  // a child of the user's must not hold on to it
  if (bytes >= kHugePage) madvise(data, bytes, MADV_HUGEPAGE);  // measured: 6 % at 25 MiB
  segment.data_ = static_cast<char*>(data);
  segment.bytes_ = bytes;
  return segment;
}

Segment::Segment(Segment&& other) noexcept { *this = std::move(other); }

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(fd_, other.fd_);
  std::swap(handle_, other.handle_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, bytes_);
  close_handle();
}

void Segment::close_handle() {
  if (handle_.path[0] != '\0') unlink(handle_.path);
  handle_ = {};
  fd_.reset();
}

void Segment::discard(int64_t offset, int64_t bytes) const noexcept {
  madvise(data_ + offset, bytes, MADV_REMOVE);
}

void Segment::populate(int64_t offset, int64_t bytes) const {
  if (bytes == 0) return;
  const int64_t begin = offset / kPage * kPage,
                end = std::min(bytes_, (offset + bytes + kPage - 1) / kPage * kPage);
  if (madvise(data_ + begin, end - begin, MADV_POPULATE_WRITE) == 0) return;
  if (errno != EINVAL) too_little(bytes, "cannot fill", errno);
  // Before Linux 5.14: touch each page; a full machine then ends in SIGBUS after all.
  for (int64_t at = begin; at < end; at += kPage) {
    volatile char* page = data_ + at;
    *page = *page;
  }
}

}  // namespace lockstep::comm
