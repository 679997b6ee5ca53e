// When a job that has failed is started again.
#pragma once

#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "launch/job/outcome.h"

namespace lockstep::launch {

// A failure within kQuick of its start is a quick one. The first restart comes at once; between
// quick failures in a row the pauses double, from 0.25 to 30 s. The same rank failing in the same
// way kLoop times in a row, quickly, is a crash loop, whichever rank fails first when several do:
// more restarts would only repeat it. SIGKILL comes from outside and never counts as a loop.
class Restarts {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kQuick{5};
  static constexpr int kLoop = 3;

  explicit Restarts(int most) : most_(most) {}

  struct Decision {
    // The pause before the next start; nothing when there is none.
    std::optional<std::chrono::milliseconds> pause;
    std::string text;  // for the user; empty when no restarts were asked for
  };
  struct Fault {
    int rank = -1;   // that failed first; none when a host was lost
    int status = 0;  // how it ended, as one number
    bool from_outside = false;
  };
  // After an attempt that ended so on its only host.
  Decision after(const Outcome& outcome);
  // `ran`: from the start to the fault; how long the other ranks took to stop does not count.
  Decision after(const Fault& fault, Clock::duration ran);

 private:
  using Ways = std::set<std::pair<int, int>>;  // ranks, and how they ended
  Decision after(std::optional<int> first, Ways ways, Clock::duration ran);

  int most_, used_ = 0;
  int quick_ = 0;  // failures in a row
  int same_ = 0;   // of those, of the same kind
  Ways common_;    // to all of these
};

}  // namespace lockstep::launch
