#include "parallel/ddp/reducer/pass_clock.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace lockstep::parallel {
namespace {

using Clock = std::chrono::steady_clock;
using Duration = PassTimes::Duration;

// The length of the union of the buckets' times, cut off at `end`.
Duration busy(const PassTimes& pass, Clock::time_point end) {
  std::vector<std::pair<Clock::time_point, Clock::time_point>> spans;
  for (const auto& bucket : pass.buckets) spans.emplace_back(bucket.started, bucket.over);
  std::sort(spans.begin(), spans.end());
  Clock::duration sum{0};
  Clock::time_point covered{};
  for (const auto& [from, to] : spans) {
    const auto begin = std::max(from, covered), stop = std::min(to, end);
    if (stop > begin) sum += stop - begin;
    covered = std::max(covered, stop);
  }
  return sum;
}

double microseconds(Clock::time_point time) { return Duration(time.time_since_epoch()).count(); }

}  // namespace

Duration PassTimes::communication() const { return busy(*this, over); }
Duration PassTimes::overlap() const { return busy(*this, last_gradient); }

void PassClock::begin(size_t buckets) {
  current_.since = since_;
  current_.first_gradient = Clock::now();
  current_.buckets.assign(buckets, {});
}

void PassClock::end() {
  current_.over = since_ = Clock::now();
  passes_.push_back(current_);
  if (passes_.size() > DdpLog::kPasses) passes_.pop_front();
  ++count_;
}

void PassClock::write(DdpLog& log) const {
  log.pass_count = count_;
  log.passes.assign(passes_.begin(), passes_.end());
}

std::string DdpLog::summary() const {
  const auto mean = [&](auto figure) {
    double sum = 0;
    for (const auto& pass : passes) sum += (pass.*figure)().count();
    return passes.empty() ? 0 : sum / static_cast<double>(passes.size());
  };
  int64_t bytes = 0;
  for (const int64_t bucket : bucket_bytes) bytes += bucket;
  return fmt::format(
      "[ddp] rank {} of {} over {}: {} parameters, {:.1f} MB; {} bucket{} of {:.1f} MB in all "
      "({}), by {}\n"
      "[ddp] mean of {} passes: forward {:.0f} us, backward {:.0f} us, communication {:.0f} us, of "
      "which {:.0f} us overlapped; "
      "{:.0f} us were waited for\n",
      rank, world_size, backend, parameters, static_cast<double>(parameter_bytes) / 1e6,
      bucket_bytes.size(), bucket_bytes.size() == 1 ? "" : "s", static_cast<double>(bytes) / 1e6,
      rebuilt ? "in the order in which gradients arrive" : "in reverse order of registration", hook,
      passes.size(), mean(&PassTimes::forward), mean(&PassTimes::backward),
      mean(&PassTimes::communication), mean(&PassTimes::overlap), mean(&PassTimes::exposed));
}

std::string DdpLog::chrome_trace() const {
  using nlohmann::json;
  json events = json::array();
  const auto name = [&](const char* what, int thread, const std::string& text) {
    events.push_back(
        {{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", thread}, {"args", {{"name", text}}}});
  };
  name("process_name", 0, fmt::format("rank {}", rank));
  name("thread_name", 0, "compute");
  // A thread for each bucket: their times overlap.
  for (size_t i = 0; i < bucket_bytes.size(); ++i)
    name("thread_name", static_cast<int>(i) + 1, fmt::format("bucket {}", i));
  const auto span = [&](const std::string& text, int thread, Clock::time_point from,
                        Clock::time_point to, json args) {
    events.push_back({{"ph", "X"},
                      {"name", text},
                      {"pid", rank},
                      {"tid", thread},
                      {"ts", microseconds(from)},
                      {"dur", Duration(to - from).count()},
                      {"args", std::move(args)}});
  };
  int64_t number = pass_count - static_cast<int64_t>(passes.size());
  for (const auto& pass : passes) {
    const json args = {{"pass", number++}};
    span("forward", 0, pass.since, pass.first_gradient, args);
    span("backward", 0, pass.first_gradient, pass.last_gradient, args);
    span("wait", 0, pass.last_gradient, pass.over, args);
    for (size_t i = 0; i < pass.buckets.size(); ++i) {
      const auto& bucket = pass.buckets[i];
      span(hook, static_cast<int>(i) + 1, bucket.started, bucket.over,
           {{"bytes", bucket.bytes}, {"pass", args["pass"]}});
    }
  }
  return json{{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}}.dump();
}

}  // namespace lockstep::parallel
