#include "train/monitor/process_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>

namespace lockstep::train {

int64_t resident_bytes() {
  const int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  char text[128] = {};
  const ssize_t count = read(fd, text, sizeof text - 1);
  close(fd);
  if (count <= 0) return 0;
  char* end = nullptr;
  std::strtoll(text, &end, 10);  // the program's size; resident pages follow
  return std::strtoll(end, nullptr, 10) * sysconf(_SC_PAGESIZE);
}

}  // namespace lockstep::train
