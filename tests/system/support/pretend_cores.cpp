// Preloaded into a program, lets it see PRETEND_CORES cores, whatever the machine has, and bind
// itself to some of them.
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace {

int pretended() {
  const char* text = getenv("PRETEND_CORES");
  return text != nullptr ? atoi(text) : 1;
}

// Of the whole process.
bool is_bound = false;
cpu_set_t bound;

int fill(size_t bytes, cpu_set_t* mask) {
  memset(mask, 0, bytes);
  for (int core = 0; core < pretended(); ++core) {
    if (!is_bound || CPU_ISSET(core, &bound)) CPU_SET_S(core, bytes, mask);
  }
  return 0;
}

}  // namespace

extern "C" {

int sched_getaffinity(pid_t, size_t bytes, cpu_set_t* mask) noexcept { return fill(bytes, mask); }

int sched_setaffinity(pid_t, size_t bytes, const cpu_set_t* mask) noexcept {
  memset(&bound, 0, sizeof bound);
  memcpy(&bound, mask, bytes < sizeof bound ? bytes : sizeof bound);
  is_bound = true;
  return 0;
}

int pthread_getaffinity_np(pthread_t, size_t bytes, cpu_set_t* mask) noexcept {
  return fill(bytes, mask);
}

long sysconf(int name) noexcept {
  if (name == _SC_NPROCESSORS_ONLN || name == _SC_NPROCESSORS_CONF) return pretended();
  static const auto real = reinterpret_cast<long (*)(int)>(dlsym(RTLD_NEXT, "sysconf"));
  return real(name);
}

int get_nprocs() noexcept { return pretended(); }
int get_nprocs_conf() noexcept { return pretended(); }
}
