#include "train/monitor/step_trace.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "train/monitor/run_environment.h"

namespace lockstep::train {
namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

constexpr int64_t kMostSteps = 1000;  // 1,000 operators a step are 100 MB of text then

int64_t unix_clock_ns() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Ranks whose kernel is the same have the same clock.
std::string kernel() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id.empty() ? host_name() : id;
}

const char* name_of(flight::Activity activity) {
  switch (activity) {
    case flight::Activity::Communication:
      return "wait";
    case flight::Activity::Data:
      return "data";
    case flight::Activity::Checkpoint:
      return "checkpoint";
  }
  return "";
}

// One rank's events. Each track has spans that nest, or follow one another.
class Events {
 public:
  Events(int rank, int64_t shift_ns) : rank_(rank), shift_ns_(shift_ns) {}

  // Times are CLOCK_MONOTONIC's.
  void span(const std::string& track, const char* category, std::string_view name,
            uint64_t begin_ns, uint64_t end_ns) {
    const int thread = thread_of(track);
    // As digits: the nanoseconds since 1970 are more than a double holds.
    const int64_t at = static_cast<int64_t>(begin_ns) + shift_ns_;
    const auto length = static_cast<int64_t>(end_ns > begin_ns ? end_ns - begin_ns : 0);
    add(fmt::format(
        R"({{"ph":"X","cat":"{}","name":{},"pid":{},"tid":{},"ts":{}.{:03},"dur":{}.{:03}}})",
        category, text(name), rank_, thread, at / 1000, at % 1000, length / 1000, length % 1000));
  }
  void process(const std::string& name) {
    add(fmt::format(R"({{"ph":"M","name":"process_name","pid":{},"tid":0,"args":{{"name":{}}}}})",
                    rank_, text(name)));
    add(fmt::format(
        R"({{"ph":"M","name":"process_sort_index","pid":{0},"tid":0,"args":{{"sort_index":{0}}}}})",
        rank_));
  }
  std::string take() { return std::move(all_); }

 private:
  static std::string text(std::string_view name) {
    return nlohmann::json(name).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }
  void add(const std::string& event) { all_ += (all_.empty() ? "" : ",\n") + event; }
  // Tracks are shown in the order in which they are first used.
  int thread_of(const std::string& track) {
    const auto [at, is_new] = threads_.emplace(track, static_cast<int>(threads_.size()) + 1);
    if (is_new) {
      add(fmt::format(R"({{"ph":"M","name":"thread_name","pid":{},"tid":{},"args":{{"name":{}}}}})",
                      rank_, at->second, text(track)));
      add(fmt::format(
          R"({{"ph":"M","name":"thread_sort_index","pid":{0},"tid":{1},"args":{{"sort_index":{1}}}}})",
          rank_, at->second));
    }
    return at->second;
  }

  int rank_;
  int64_t shift_ns_;
  std::string all_;
  std::map<std::string, int> threads_;
};

}  // namespace

void StepTrace::check(const StepRange& steps) {
  if (steps.first < 1 || steps.last < steps.first || steps.last - steps.first >= kMostSteps) {
    throw ConfigError(fmt::format(
        "[monitor] trace_steps are {} to {}: give the first and the last of at most {} steps, "
        "counted from 1",
        steps.first, steps.last, kMostSteps));
  }
}

StepTrace::StepTrace(const comm::World& world, const StepRange& steps, std::string path,
                     int64_t step)
    : world_(world), steps_(steps), path_(std::move(path)) {
  // libtorch's profiler writes remarks of its own to stderr, of GPUs that are not there for
  // instance.
  setenv("KINETO_LOG_LEVEL", "99", 0);
  is_over_ = step >= steps_.last;
  if (!is_over_ && step + 1 >= steps_.first) begin(step + 1);
}

StepTrace::~StepTrace() {
  try {
    stop();
  } catch (const std::exception&) {
    // The profiler is libtorch's; a missing trace is no reason to fail.
  }
}

void StepTrace::begin(int64_t step) {
  first_ = step;
  is_recording_ = true;
  // A profiler that the program has started continues; then its operators are not in this trace.
  has_profiler_ = !torch::profiler::impl::profilerEnabled();
  if (has_profiler_) {
    std::set<ActivityType> kinds{ActivityType::CPU};
    if (world_.device().is_cuda()) kinds.insert(ActivityType::CUDA);
    const torch::profiler::impl::ProfilerConfig config(
        torch::profiler::impl::ProfilerState::KINETO);
    profiler::prepareProfiler(config, kinds);
    profiler::enableProfiler(config, kinds);
  } else if (world_.is_main()) {
    log::warn("[monitor] the program has a profiler running: the trace has no operators");
  }
  flight::start_recording();
  const uint64_t now = flight::now_ns();
  unix_ns_ = unix_clock_ns() - static_cast<int64_t>(now);
  step_ends_ns_ = {now};
}

StepTrace::Recorded StepTrace::stop() {
  Recorded all;
  if (!std::exchange(is_recording_, false)) return all;
  all.flight = flight::stop_recording();
  if (!std::exchange(has_profiler_, false)) return all;
  const auto result = profiler::disableProfiler();
  for (const auto& one : result->events()) {
    const auto at = [&](uint64_t ns) {
      return static_cast<uint64_t>(static_cast<int64_t>(ns) - unix_ns_);
    };
    all.operators.push_back({.name = one.name(),
                             .track = one.deviceType() == c10::DeviceType::CPU
                                          ? fmt::format("operators, thread {}", one.startThreadId())
                                          : fmt::format("device {}, stream {}", one.deviceIndex(),
                                                        one.deviceResourceId()),
                             .begin_ns = at(one.startNs()),
                             .end_ns = at(one.endNs())});
  }
  return all;
}

std::string StepTrace::events(const Recorded& recorded, int64_t shift_ns) const {
  Events all(world_.rank(), shift_ns);
  all.process(fmt::format("rank {} on {}", world_.rank(), host_name()));
  for (size_t i = 1; i < step_ends_ns_.size(); ++i) {
    all.span("steps", "step", fmt::format("step {}", first_ + static_cast<int64_t>(i) - 1),
             step_ends_ns_[i - 1], step_ends_ns_[i]);
  }
  const uint64_t begin = step_ends_ns_.front(), end = step_ends_ns_.back();
  for (const auto& span : recorded.flight.spans) {
    const std::string track = span.thread == static_cast<uint32_t>(getpid())
                                  ? "data, waits, checkpoints"
                                  : fmt::format("data, waits, checkpoints, thread {}", span.thread);
    all.span(track, name_of(span.activity), name_of(span.activity), std::max(span.begin_ns, begin),
             std::min(span.end_ns, end));
  }
  // Several are on their way at a time: each is in the first track that is free.
  std::vector<uint64_t> free_at;
  for (const auto& [operation, call] : recorded.flight.calls) {
    const uint64_t over = operation.end_ns == 0 ? end : std::min(operation.end_ns, end);
    size_t track = 0;
    while (track < free_at.size() && free_at[track] > operation.start_ns) ++track;
    if (track == free_at.size()) free_at.emplace_back();
    free_at[track] = over;
    const std::string label = operation.label.data();
    all.span(fmt::format("collectives {}", track + 1),
             label.starts_with("bucket") ? "bucket" : "collective", operation.text(),
             operation.start_ns, over);
  }
  for (const auto& one : recorded.operators) {
    all.span(one.track, "operator", one.name, one.begin_ns, one.end_ns);
  }
  if (recorded.flight.left_out > 0) {
    log::warn(fmt::format("[monitor] the trace is without {} spans: trace fewer steps",
                          recorded.flight.left_out));
  }
  return all.take();
}

void StepTrace::after_step(int64_t step) {
  if (is_over_) return;
  if (is_recording_) {
    step_ends_ns_.push_back(flight::now_ns());
    if (step == steps_.last) {
      is_over_ = true;
      const Recorded recorded = stop();
      // All ranks leave a barrier at about the same moment, which tells how far the clocks of
      // other hosts are from rank 0's.
      const comm::Group& group = world_.group();
      group.barrier({.label = "trace: clocks"}).wait();
      const auto now = static_cast<int64_t>(flight::now_ns()) + unix_ns_;
      const auto main = nlohmann::json::parse(group.broadcast_bytes(
          nlohmann::json({{"kernel", kernel()}, {"now", now}, {"unix", unix_ns_}}).dump(), 0,
          {.label = "trace: clocks"}));
      const int64_t shift = main["kernel"] == kernel()
                                ? main["unix"].get<int64_t>()
                                : unix_ns_ + main["now"].get<int64_t>() - now;
      const auto ranks = group.gather_bytes(events(recorded, shift), 0, {.label = "trace: events"});
      if (world_.is_main()) write(ranks);
    }
  } else if (step + 1 == steps_.first) {
    begin(steps_.first);
  }
}

void StepTrace::end(int64_t step) {
  if (std::exchange(is_over_, true)) return;
  const bool has_begun = is_recording_;
  const Recorded recorded = stop();
  if (!world_.is_main()) return;
  if (!has_begun) {
    log::warn(fmt::format(
        "[monitor] the run ended after step {}, and trace_steps begin with step {}: there is no "
        "trace.json; give steps that the run makes",
        step, steps_.first));
    return;
  }
  log::warn(fmt::format(
      "[monitor] the run ended after step {}, and the trace was to last until step {}: it has what "
      "rank 0 did until then",
      step, steps_.last));
  write({events(recorded, unix_ns_)});
}

void StepTrace::write(const std::vector<std::string>& ranks) {
  const std::string unfinished = fmt::format("{}.{}", path_, getpid());
  std::ofstream file(unfinished, std::ios::binary);
  file << "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  for (size_t i = 0; i < ranks.size(); ++i) file << (i == 0 ? "" : ",\n") << ranks[i];
  file << "\n]}\n";
  file.close();
  if (file && std::rename(unfinished.c_str(), path_.c_str()) == 0) return;
  unlink(unfinished.c_str());
  log::warn("[monitor] " + path_ + " cannot be written; training continues without");
}

}  // namespace lockstep::train
