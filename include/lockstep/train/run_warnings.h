// What is wrong with a run, as far as its reports show it, and what to do about it. Needs no torch.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/train/run_log.h"

namespace lockstep::train {

// From where on something is worth a warning.
struct WarningLimits {
  // In a step a rank works this many times as long as the median of the others, and this much
  // longer.
  double straggler = 1.25;
  double straggler_seconds = 0.002;
  // The share of a step's time that ranks wait for batches, the mean over ranks.
  double data_share = 0.25;
  // The share of the time in which GPUs compute, the mean over ranks, is less.
  double gpu_busy = 0.4;
  // A rank has this many times the memory of the median of the others, and this much more.
  double memory_imbalance = 1.5;
  int64_t memory_imbalance_bytes = int64_t{256} << 20;
  // A rank's memory has grown by this factor and so much, and grows in every report.
  double memory_growth = 1.2;
  int64_t memory_growth_bytes = int64_t{64} << 20;
  // The loss is this many times as far from its best as the first was, as the best is from zero,
  // and as its last large change; where these changes reach zero, also as 0.1.
  double exploding_loss = 3;
  // The norm of the gradients is this many times its mean.
  double exploding_gradient = 100;
  // Between two warnings of one kind, in seconds of the run.
  double quiet_seconds = 60;
};

// Looks at one report after another. What depends on timing has to be seen in two reports in a row
// before it is warned of, since one step may be slow for any reason.
class RunWarnings {
 public:
  // Has said nothing yet.
  explicit RunWarnings(const WarningLimits& limits = {}) : limits_(limits) {}

  // What there is to say now: events of kind "warning", each kind of trouble at most once in
  // WarningLimits::quiet_seconds. `parameter`: the first parameter whose gradient is not finite,
  // where that is known.
  std::vector<Event> look(const StepReport& report, std::string_view parameter = {});

 private:
  using Events = std::vector<Event>;
  void look_at_loss(const StepReport& report, std::string_view parameter, Events& events);
  void look_for_explosion(const StepReport& report, double loss, Events& events);
  void look_for_jump(const StepReport& report, double norm, Events& events);
  void look_at_times(const StepReport& report, Events& events);
  void look_at_gpus(const StepReport& report, Events& events);
  void look_at_memory(const StepReport& report, Events& events);
  // Adds it unless its kind has been warned of just before.
  bool say(const std::string& trouble, Event event, Events& events);

  WarningLimits limits_;
  std::map<std::string, double> said_;  // by trouble: when
  int64_t losses_ = 0;
  double first_loss_ = 0, best_loss_ = 0, last_loss_ = 0;
  double loss_change_ = 0;  // the largest of late
  double gradient_norm_ = 0;
  int64_t gradients_ = 0;
  int slow_rank_ = -1;  // of the report before
  bool starved_ = false, idled_ = false;
  struct Memory {
    int64_t reports = 0, base = 0, last = 0;
    int grown = 0;  // reports in a row
  };
  std::vector<Memory> memory_;
};

}  // namespace lockstep::train
