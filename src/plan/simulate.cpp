#include "lockstep/plan/simulate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <ranges>
#include <vector>

#include "lockstep/core/error.h"
#include "plan/sharding.h"
#include "plan/sizes.h"
#include "plan/timeline.h"

namespace lockstep::plan {
namespace {

constexpr double kMostSpans = 1e6;          // of computation in a timeline, which take 300 MB
constexpr double kMostComputations = 1e11;  // of all ranks, which take ten minutes

// One step of one strategy, unit by unit.
class Player {
 public:
  Player(const ModelProfile& model, const Training& training, Strategy strategy,
         const Machine& machine, int64_t ranks, const SimulationOptions& options)
      : model_(model),
        training_(under(training, strategy)),
        strategy_(strategy),
        machine_(machine),
        all_{.count = ranks, .per_node = machine.devices_per_node},
        shards_{.count = shard_ranks(strategy, machine, ranks),
                .per_node = machine.devices_per_node},
        work_(work_of(model, training, strategy, machine, ranks)),
        options_(options),
        timeline_(ranks, options) {
    divides_ = strategy != Strategy::Ddp && strategy != Strategy::Zero;
    gathers_ = divides_ && !shares_parameters(machine, all_);
    meeting_ = divides_ ? meeting_seconds(machine, all_) : 0;
    bytes_ = divides_ && training.precision == Precision::Narrow ? 2 : kFloat;
    for (const auto& unit : model.units) {
      passes_ += weight_of(unit) * passes_through(unit, training_);
      if (unit.is_block) continue;
      root_ += bytes_ * static_cast<double>(unit.elements());
      root_gradients_ += bytes_ * static_cast<double>(unit.trained());
    }
  }

  void step() {
    timeline_.begin_step();
    const int64_t passes = passes_of(training_, all_.count);
    for (int64_t i = 0; i < passes; ++i) {
      forward(i % (passes / training_.accumulation) == 0);  // of its micro-batch the first lane
      backward(i + 1 == passes);
    }
    timeline_.wait();
    timeline_.compute("update", work_.update);
    if (strategy_ == Strategy::Zero) {
      timeline_.collective(
          "gather parameters",
          all_gather_seconds(machine_, all_, kFloat * static_cast<double>(model_.trained())),
          timeline_.latest());
      timeline_.wait();
    }
  }

  const Timeline& timeline() const { return timeline_; }

 private:
  double weight_of(const ProfileUnit& unit) const { return unit.flops > 0 ? unit.flops : 1; }
  // Of one pass through the unit.
  double seconds(const ProfileUnit& unit) const {
    return work_.computation * weight_of(unit) / passes_ /
           static_cast<double>(passes_of(training_, all_.count));
  }
  double gather(const ProfileUnit& unit, double ready) {
    if (!gathers_ || !unit.is_block) return 0;
    return timeline_.collective(
        "gather " + unit.name,
        all_gather_seconds(machine_, shards_, bytes_ * static_cast<double>(unit.elements())),
        ready);
  }
  // Computes units one after the other, none before `ready`. While one computes, the next is
  // gathered, or when it is needed; it is asked for before this one's gradients are sent.
  template <class Iterator, class Compute>
  void each(Iterator first, Iterator last, bool gathers, double ready, const Compute& compute) {
    double next = ready;
    for (auto unit = first; unit != last; ++unit) {
      double own = next;
      if (gathers && (unit == first || !options_.prefetch)) {
        own = std::max(ready, gather(*unit, std::max(ready, timeline_.latest())));
      }
      if (gathers && options_.prefetch && std::next(unit) != last) {
        const double begin = std::max(own, timeline_.latest());
        next = std::max(ready, gather(*std::next(unit), begin));
      }
      compute(*unit, own);
    }
  }

  void forward(bool meets) {
    double ready = 0;
    if (meets && meeting_ > 0) {
      ready = timeline_.collective("meet", meeting_, timeline_.latest());
    }
    if (gathers_) {
      ready = timeline_.collective("gather root", all_gather_seconds(machine_, shards_, root_),
                                   timeline_.latest());
    }
    each(model_.units.begin(), model_.units.end(), gathers_, ready,
         [this](const ProfileUnit& unit, double gathered) {
           timeline_.compute("forward " + unit.name, seconds(unit), gathered);
         });
  }

  void backward(bool sends) {
    double filled = 0, limit = kFirstBucket;
    const bool again = gathers_ && !keeps_parameters(strategy_);
    auto units =
        model_.units | std::views::reverse | std::views::filter(&ProfileUnit::has_backward);
    each(units.begin(), units.end(), again, 0, [&](const ProfileUnit& unit, double gathered) {
      timeline_.compute("backward " + unit.name,
                        seconds(unit) * (passes_through(unit, training_) - 1), gathered);
      if (!sends) return;
      const auto elements = static_cast<double>(unit.trained());
      if (divides_) {
        if (unit.is_block && elements > 0) reduce(unit.name, bytes_ * elements);
        return;
      }
      filled += kFloat * elements;  // bucket sizes count float32, not what a hook sends
      if (filled < limit && &unit != &units.back()) return;
      if (filled == 0) return;
      const double sent = filled * static_cast<double>(training_.sent_bytes) / kFloat;
      timeline_.collective("all_reduce", all_reduce_seconds(machine_, all_, sent),
                           timeline_.latest());
      filled = 0;
      limit = training_.bucket_bytes;
    });
    if (!sends || !divides_) return;
    if (root_gradients_ > 0) reduce("root", root_gradients_);
    timeline_.collective("tell", telling_seconds(model_, machine_, all_), timeline_.latest());
  }

  void reduce(const std::string& name, double bytes) {
    timeline_.collective("reduce " + name, reduce_scatter_seconds(machine_, shards_, bytes),
                         timeline_.latest());
    if (!is_hybrid(strategy_) || shards_.count == all_.count) return;
    const Ranks nodes = {.count = all_.nodes(), .per_node = 1};
    timeline_.collective("all_reduce " + name, all_reduce_seconds(machine_, nodes, bytes),
                         timeline_.latest());
  }

  const ModelProfile& model_;
  Training training_;
  Strategy strategy_;
  const Machine& machine_;
  Ranks all_, shards_;
  StepWork work_;
  SimulationOptions options_;
  Timeline timeline_;
  bool divides_ = false, gathers_ = false;
  double bytes_ = kFloat, root_ = 0, root_gradients_ = 0, passes_ = 0, meeting_ = 0;
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

Simulation simulate(const ModelProfile& model, const Training& training, Strategy strategy,
                    const Machine& machine, int64_t ranks, const SimulationOptions& options) {
  const auto refuse = [](const std::string& what) { throw ConfigError("[simulate] " + what); };
  check_training(training, machine, ranks, "simulate");
  if (is_hybrid(strategy) && ranks > machine.devices_per_node &&
      ranks % machine.devices_per_node != 0) {
    refuse(fmt::format("{} of {} ranks: give full nodes of {}, or another --strategy",
                       name_of(strategy), ranks, machine.devices_per_node));
  }
  if (options.steps < 1) refuse(fmt::format("{} steps: at least 1", options.steps));
  if (!(options.jitter >= 0 && options.jitter <= 1)) {
    refuse(fmt::format("a jitter of {}: 0 to 1", options.jitter));
  }
  if (options.slow_ranks < 0 || options.slow_ranks > ranks) {
    refuse(fmt::format("{} slow ranks of {}: give 0 to {}", options.slow_ranks, ranks, ranks));
  }
  if (!(options.slow_factor >= 1) || !std::isfinite(options.slow_factor)) {
    refuse(fmt::format("slow ranks {} times as slow: give a finite number of at least 1",
                       options.slow_factor));
  }
  if (options.traced_ranks < 0) {
    refuse(fmt::format("{} traced ranks: give 0 or more", options.traced_ranks));
  }
  // A forward and a backward pass of each unit, and with them at most as many collectives.
  const double of_rank = 2.0 * static_cast<double>(model.units.size()) *
                         static_cast<double>(passes_of(training, ranks)) *
                         static_cast<double>(options.steps);
  if (const double all = of_rank * static_cast<double>(ranks); all > kMostComputations) {
    refuse(
        fmt::format("{} steps of {} micro-batches on {} ranks are {:.3g} computations of a unit: "
                    "give fewer --steps or --ranks, or a lower "
                    "training.gradient_accumulation_steps, for at most {:.0f}",
                    options.steps, passes_of(training, ranks), ranks, all, kMostComputations));
  }
  const double spans = of_rank * static_cast<double>(std::min(ranks, options.traced_ranks));
  if (spans > kMostSpans) {
    refuse(
        fmt::format("a timeline of {} steps has {:.3g} spans of computation: give fewer --steps "
                    "or --traced-ranks, for at most {:.0f}",
                    options.steps, spans, kMostSpans));
  }
  Player player(model, training, strategy, machine, ranks, options);
  Simulation out;
  double begin = 0;
  for (int64_t step = 0; step < options.steps; ++step) {
    player.step();
    out.steps.push_back(player.timeline().latest() - begin);
    begin = player.timeline().latest();
  }
  const auto steps = static_cast<double>(options.steps);
  out.computation = median(player.timeline().computed()) / steps;
  out.waiting = median(player.timeline().waited()) / steps;
  out.communication = player.timeline().communication() / steps;
  out.slowest_rank = player.timeline().slowest();
  out.trace = player.timeline().trace();
  return out;
}

}  // namespace lockstep::plan
