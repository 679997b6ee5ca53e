#include "core/process/cores.h"

#include <sched.h>

#include <cerrno>
#include <memory>

namespace lockstep {

std::vector<int> allowed_cores() {
  std::vector<int> ids;
  // The kernel refuses a mask that is narrower than its own.
  for (int most = CPU_SETSIZE; most <= 1 << 20; most *= 4) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> mask(
        CPU_ALLOC(most), [](cpu_set_t* set) { CPU_FREE(set); });
    const size_t bytes = CPU_ALLOC_SIZE(most);
    if (sched_getaffinity(0, bytes, mask.get()) == 0) {
      for (int id = 0; id < most; ++id) {
        if (CPU_ISSET_S(id, bytes, mask.get())) ids.push_back(id);
      }
      break;
    }
    if (errno != EINVAL) break;
  }
  return ids;
}

}  // namespace lockstep
