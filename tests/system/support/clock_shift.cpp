// Preloaded into a program, lets its wall clock jump an hour forth and back every few readings.
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

#include <atomic>

namespace {
long shift() {
  static std::atomic<unsigned> readings{0};
  return readings++ / 16 % 2 == 0 ? 3600 : -3600;
}
}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* now) {
  using Call = int (*)(clockid_t, timespec*);
  static const auto real = reinterpret_cast<Call>(dlsym(RTLD_NEXT, "clock_gettime"));
  const int status = real(clock, now);
  if (status == 0 && clock == CLOCK_REALTIME) now->tv_sec += shift();
  return status;
}

extern "C" int gettimeofday(timeval* now, void*) {
  timespec real{};
  const int status = clock_gettime(CLOCK_REALTIME, &real);
  *now = {real.tv_sec, real.tv_nsec / 1000};
  return status;
}

extern "C" time_t time(time_t* out) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != nullptr) *out = now.tv_sec;
  return now.tv_sec;
}
