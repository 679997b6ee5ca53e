#include "plan/timeline.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>

#include "core/hash/mix.h"
#include "lockstep/plan/cost_model.h"

namespace lockstep::plan {
namespace {

constexpr double kSlowestSpeed = 0.2;

// Box and Muller's, of two numbers that depend on their place alone.
double normal(uint64_t seed, uint64_t step, uint64_t rank) {
  const uint64_t base = mix(mix(mix(seed) ^ step) ^ rank);
  const double a = (static_cast<double>(base >> 11) + 0.5) * 0x1p-53;
  const double b = static_cast<double>(mix(base) >> 11) * 0x1p-53;
  return std::sqrt(-2 * std::log(a)) * std::cos(2 * std::numbers::pi * b);
}

}  // namespace

Timeline::Timeline(int64_t ranks, const SimulationOptions& options)
    : options_(options),
      clocks_(static_cast<size_t>(ranks)),
      speed_(clocks_.size(), 1),
      computed_(clocks_.size()),
      waited_(clocks_.size()) {
  for (int64_t rank = 0; rank < std::min(ranks, options.traced_ranks); ++rank)
    traced_.push_back(rank);
  // Slow ranks are the last ones.
  const bool has_slow = options.slow_ranks > 0 && options.traced_ranks > 0;
  if (has_slow && ranks > options.traced_ranks) traced_.push_back(ranks - 1);
}

void Timeline::begin_step() {
  ++step_;
  // What ended before the first rank's clock slows nothing down any more.
  const double now = *std::ranges::min_element(clocks_);
  busy_.erase(busy_.begin(),
              std::ranges::find_if(busy_, [now](const Busy& busy) { return busy.end > now; }));
  const auto first_slow = clocks_.size() - static_cast<size_t>(options_.slow_ranks);
  for (size_t rank = 0; rank < clocks_.size(); ++rank) {
    double factor = 1;
    if (options_.jitter > 0) {
      factor = std::max(kSlowestSpeed, 1 + options_.jitter * normal(options_.seed, step_, rank));
    }
    speed_[rank] = rank >= first_slow ? factor * options_.slow_factor : factor;
  }
}

double Timeline::overlap(double begin, double end) const {
  double sum = 0;
  for (auto busy = busy_.rbegin(); busy != busy_.rend() && busy->end > begin; ++busy) {
    sum += std::max(0.0, std::min(end, busy->end) - std::max(begin, busy->begin));
  }
  return sum;
}

void Timeline::wait_until(size_t rank, double time) {
  if (time <= clocks_[rank]) return;
  waited_[rank] += time - clocks_[rank];
  clocks_[rank] = time;
}

void Timeline::compute(const std::string& name, double seconds, double not_before) {
  for (size_t rank = 0; rank < clocks_.size(); ++rank) {
    wait_until(rank, not_before);
    const double begin = clocks_[rank], alone = seconds * speed_[rank];
    const double taken = alone + kSlowdownOfOverlap * overlap(begin, begin + alone);
    clocks_[rank] = begin + taken;
    computed_[rank] += taken;
    latest_ = std::max(latest_, clocks_[rank]);
    if (const auto number = static_cast<int64_t>(rank);
        std::ranges::binary_search(traced_, number)) {
      events_.push_back({name, number, false, begin, taken});
    }
  }
}

double Timeline::collective(const std::string& name, double seconds, double ready) {
  if (seconds <= 0) return ready;
  const double begin = std::max(free_, ready);
  free_ = begin + seconds;
  communication_ += seconds;
  if (!busy_.empty() && busy_.back().end >= begin) {
    busy_.back().end = free_;  // one after the other
  } else {
    busy_.push_back({begin, free_});
  }
  for (const int64_t rank : traced_) events_.push_back({name, rank, true, begin, seconds});
  return free_;
}

void Timeline::wait() {
  for (size_t rank = 0; rank < clocks_.size(); ++rank) wait_until(rank, free_);
  latest_ = std::max(latest_, free_);
}

int64_t Timeline::slowest() const {
  return std::ranges::max_element(computed_) - computed_.begin();
}

// Event by event, each of which as an object would take ten times its text.
std::string Timeline::trace() const {
  using Json = nlohmann::ordered_json;
  constexpr double kMicro = 1e6;
  std::string all;
  const auto add = [&all](const Json& event) { all += (all.empty() ? "" : ",\n") + event.dump(); };
  for (const int64_t rank : traced_) {
    const auto named = [&](const char* what, int thread, const std::string& name) {
      add({{"ph", "M"},
           {"name", what},
           {"pid", rank},
           {"tid", thread},
           {"args", {{"name", name}}}});
    };
    named("process_name", 0, "rank " + std::to_string(rank));
    named("thread_name", 0, "computation");
    named("thread_name", 1, "communication");
  }
  for (const auto& event : events_) {
    add({{"ph", "X"},
         {"name", event.name},
         {"cat", event.is_collective ? "collective" : "compute"},
         {"pid", event.rank},
         {"tid", event.is_collective ? 1 : 0},
         {"ts", event.begin * kMicro},
         {"dur", event.seconds * kMicro}});
  }
  return R"({"displayTimeUnit":"ms","traceEvents":[)" + all + "]}\n";
}

}  // namespace lockstep::plan
