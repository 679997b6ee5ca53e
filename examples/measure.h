// What a program can say about its own run.
#pragma once

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace example {

// Seconds since the job was started: its launcher when there is one, otherwise this process. The
// kernel keeps start times in steps of 10 ms.
inline double seconds_since_job_start() {
  const pid_t pid = std::getenv("RANK") != nullptr ? getppid() : getpid();
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  text.erase(0, text.rfind(')') + 1);  // the name may hold spaces
  std::istringstream fields(text);
  std::string skipped;
  for (int i = 0; i < 19; ++i) fields >> skipped;
  double ticks = 0;
  fields >> ticks;
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9 -
         ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

// Peak resident memory of this process. Not getrusage(), which counts the parent's before exec().
inline double peak_rss_mb() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) / 1024;
  }
  return 0;
}

// Times each turn of a loop.
class Laps {
 public:
  void lap() {
    const auto now = Clock::now();
    laps_us_.push_back(std::chrono::duration<double, std::micro>(now - last_).count());
    last_ = now;
  }
  double total_s() const { return std::chrono::duration<double>(last_ - start_).count(); }
  double median_us() const {
    std::vector<double> sorted = laps_us_;
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    return *middle;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now(), last_ = start_;
  std::vector<double> laps_us_;
};

}  // namespace example
