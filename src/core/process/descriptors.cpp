#include "core/process/descriptors.h"

#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>
#include <limits>
#include <optional>

namespace lockstep {
namespace {

// Beyond this many, tables by descriptor of other libraries become large (systemd's own limit).
constexpr rlim_t kMost = 524288;

std::optional<rlimit> limit_before;

}  // namespace

void raise_descriptor_limit() noexcept {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted = std::min(limit.rlim_max, kMost);
  if (limit.rlim_cur >= wanted) return;
  limit_before = limit;
  limit.rlim_cur = wanted;
  setrlimit(RLIMIT_NOFILE, &limit);
}

void restore_descriptor_limit() noexcept {
  if (limit_before) setrlimit(RLIMIT_NOFILE, &*limit_before);
}

Descriptors descriptors() {
  Descriptors result;
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  result.limit =
      static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, std::numeric_limits<int64_t>::max()));
  if (DIR* const folder = opendir("/proc/self/fd")) {
    while (readdir(folder) != nullptr) ++result.used;
    result.used -= 3;  // ".", ".." and the folder itself
    closedir(folder);
  }
  return result;
}

}  // namespace lockstep
