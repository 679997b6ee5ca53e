#include "launch/process/descriptors.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cctype>
#include <cstdlib>

namespace lockstep::launch {
namespace {

// Whether all are known. Called between fork() and execve(), so without opendir(), which allocates.
template <class Call>
bool for_each_from(int first, const Call& call) {
  const int folder = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return false;
  alignas(dirent64) std::array<char, 4096> entries;
  for (;;) {
    const long size = syscall(SYS_getdents64, folder, entries.data(), entries.size());
    for (long at = 0; at < size;) {
      const auto* entry = reinterpret_cast<const dirent64*>(entries.data() + at);
      at += entry->d_reclen;
      if (!isdigit(static_cast<unsigned char>(entry->d_name[0]))) continue;
      const int fd = std::atoi(entry->d_name);
      if (fd >= first && fd != folder) call(fd);
    }
    if (size <= 0) {
      close(folder);
      return size == 0;
    }
  }
}

}  // namespace

bool close_on_exec_from(int first) {
  if (syscall(SYS_close_range, first, ~0U, CLOSE_RANGE_CLOEXEC) == 0) return true;
  return for_each_from(first, [](int fd) { fcntl(fd, F_SETFD, FD_CLOEXEC); });
}

void close_from(int first) {
  if (syscall(SYS_close_range, first, ~0U, 0U) == 0) return;
  for_each_from(first, [](int fd) { close(fd); });
}

}  // namespace lockstep::launch
