// The trace of a few steps of all ranks: operators, collectives, waits, data, checkpoints.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/flight/recording.h"
#include "lockstep/comm/world.h"
#include "lockstep/train/monitor.h"

namespace lockstep::train {

// Records from the end of the step before the first until the end of the last, on every rank.
class StepTrace {
 public:
  // Throws ConfigError for steps that cannot be traced.
  static void check(const StepRange& steps);
  // `step`: made so far.
  StepTrace(const comm::World& world, const StepRange& steps, std::string path, int64_t step);
  // Ends a recording, and writes nothing.
  ~StepTrace();
  StepTrace(const StepTrace&) = delete;
  StepTrace& operator=(const StepTrace&) = delete;

  // After each step, on every rank, with the number of steps made: a collective after the last
  // one that is traced, after which rank 0 writes the file.
  void after_step(int64_t step);
  // The run ends after `step`: where that is within the trace, rank 0 writes what it has itself.
  void end(int64_t step);

 private:
  struct Operator {
    std::string name;
    std::string track;
    uint64_t begin_ns = 0, end_ns = 0;
  };
  struct Recorded {
    flight::Recording flight = {};
    std::vector<Operator> operators = {};
  };

  void begin(int64_t step);
  Recorded stop();
  std::string events(const Recorded& recorded, int64_t shift_ns) const;
  void write(const std::vector<std::string>& ranks);

  comm::World world_;
  StepRange steps_;
  std::string path_;
  bool is_recording_ = false, has_profiler_ = false, is_over_ = false;
  std::vector<uint64_t> step_ends_ns_ = {};  // the first is the beginning of the first step
  int64_t unix_ns_ = 0;                      // what is added to CLOCK_MONOTONIC for Unix time
  int64_t first_ = 0;                        // the step that was recorded first
};

}  // namespace lockstep::train
