// The clocks of all ranks in a simulation, and the collectives between them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/plan/simulate.h"

namespace lockstep::plan {

class Timeline {
 public:
  Timeline(int64_t ranks, const SimulationOptions& options);

  // Draws each rank's speed for a step.
  void begin_step();
  // Every rank computes, after `not_before` and after what it has computed so far.
  void compute(const std::string& name, double seconds, double not_before = 0);
  // A collective of all ranks, after `ready` and after the one before it; when it ends.
  double collective(const std::string& name, double seconds, double ready);
  // Every rank waits for all collectives.
  void wait();

  double latest() const { return latest_; }  // the last rank's clock
  double communication() const { return communication_; }
  // By rank, since the beginning.
  const std::vector<double>& computed() const { return computed_; }
  const std::vector<double>& waited() const { return waited_; }
  int64_t slowest() const;
  std::string trace() const;

 private:
  struct Event {
    std::string name;
    int64_t rank;
    bool is_collective;
    double begin, seconds;
  };
  struct Busy {
    double begin, end;
  };
  double overlap(double begin, double end) const;
  void wait_until(size_t rank, double time);

  SimulationOptions options_;
  std::vector<double> clocks_, speed_, computed_, waited_;
  std::vector<Busy> busy_;  // of collectives, ascending
  std::vector<int64_t> traced_;
  std::vector<Event> events_;
  double free_ = 0, latest_ = 0, communication_ = 0;
  uint64_t step_ = 0;
};

}  // namespace lockstep::plan
