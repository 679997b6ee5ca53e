#include "comm/segment.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <utility>

#include "lockstep/core/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace lockstep::comm {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = 2 << 20;

// A number behind `key` in a file of "key number" lines, or alone in its file when the key is empty.
int64_t number_in(const char* path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  int64_t value = std::numeric_limits<int64_t>::max();
  if (key.empty()) {
    file >> value;
    return file ? value : std::numeric_limits<int64_t>::max();
  }
  while (file >> word) {
    if (word == key && file >> value) return value;
  }
  return std::numeric_limits<int64_t>::max();
}

// Bytes that this process may still take, by the machine's, the memory cgroup's and the process's own limit.
int64_t available_bytes() {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  int64_t available = number_in("/proc/meminfo", "MemAvailable:");
  if (available != kNone) available *= 1024;
  const int64_t limit = number_in("/sys/fs/cgroup/memory.max", "");
  const int64_t used = number_in("/sys/fs/cgroup/memory.current", "");
  if (limit != kNone && used != kNone) available = std::min(available, std::max<int64_t>(0, limit - used));
  rlimit file_size{};
  if (getrlimit(RLIMIT_FSIZE, &file_size) == 0 && file_size.rlim_cur != RLIM_INFINITY) {
    available = std::min(available, static_cast<int64_t>(file_size.rlim_cur));
  }
  return available;
}

[[noreturn]] void too_little(int64_t bytes, const char* what, int error) {
  throw CommError(fmt::format(
      "[shm] {} {} bytes of shared memory: {}; {} bytes are available to this process. Use fewer ranks, a smaller model or "
      "buckets, or raise the limit (memory of the machine or container, ulimit -f)",
      what, bytes, error ? std::strerror(error) : "too little memory", available_bytes()));
}

}  // namespace

int64_t page_rounded(int64_t bytes) {
  const int64_t unit = bytes >= kHugePage ? kHugePage : kPage;
  return (bytes + unit - 1) / unit * unit;
}

Segment Segment::create(int64_t bytes) {
  // Checked first: growing a file over RLIMIT_FSIZE raises a signal, and overcommitted memory ends in a kill.
  if (bytes < 0 || bytes > available_bytes()) too_little(bytes, "cannot get", 0);
  const int fd = memfd_create("lockstep", MFD_CLOEXEC);
  if (fd < 0) too_little(bytes, "cannot get", errno);
  if (ftruncate(fd, bytes) != 0) {
    const int error = errno;
    close(fd);
    too_little(bytes, "cannot get", error);
  }
  Segment segment = map(fd, bytes);
  segment.fd_ = fd;
  return segment;
}

Segment Segment::attach(const SegmentHandle& handle) {
  const std::string path = fmt::format("/proc/{}/fd/{}", handle.pid, handle.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    throw CommError(fmt::format(
        "[shm] cannot open {} to share memory with process {}: {}. Do all ranks of this host run as one user, in one "
        "container? Otherwise set LOCKSTEP_BACKEND=gloo",
        path, handle.pid, std::strerror(errno)));
  }
  Segment segment;
  try {
    segment = map(fd, handle.bytes);
  } catch (...) {
    close(fd);
    throw;
  }
  close(fd);
  return segment;
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
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, bytes_);
  close_handle();
}

SegmentHandle Segment::handle() const { return {getpid(), fd_, bytes_}; }

void Segment::close_handle() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void Segment::discard(int64_t offset, int64_t bytes) const noexcept { madvise(data_ + offset, bytes, MADV_REMOVE); }

void Segment::populate(int64_t offset, int64_t bytes) const {
  if (bytes == 0) return;
  const int64_t begin = offset / kPage * kPage, end = std::min(bytes_, (offset + bytes + kPage - 1) / kPage * kPage);
  if (madvise(data_ + begin, end - begin, MADV_POPULATE_WRITE) == 0) return;
  if (errno != EINVAL) too_little(bytes, "cannot fill", errno);
  // Before Linux 5.14: touch each page; a full machine then ends in SIGBUS after all.
  for (int64_t at = begin; at < end; at += kPage) {
    volatile char* page = data_ + at;
    *page = *page;
  }
}

}  // namespace lockstep::comm
