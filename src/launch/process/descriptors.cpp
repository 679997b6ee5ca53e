#include "launch/process/descriptors.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <vector>

namespace lockstep::launch {
namespace {

// Whether all are known.
template <class Call>
bool for_each_from(int first, const Call& call) {
  std::vector<int> all;
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) return false;
  while (const dirent* entry = readdir(folder)) {
    if (!isdigit(static_cast<unsigned char>(entry->d_name[0]))) continue;
    const int fd = std::atoi(entry->d_name);
    if (fd >= first && fd != dirfd(folder)) all.push_back(fd);
  }
  closedir(folder);
  for (const int fd : all) call(fd);
  return true;
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
