#include "launch/diagnosis/remarks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace lockstep::launch {
namespace {

// A line says that the coordinator waits after the first of these, and that something has changed
// after the second.
constexpr Time kQuiet = std::chrono::milliseconds(1500);
constexpr Time kBetween = std::chrono::seconds(10);
constexpr size_t kMostTold = 1000;
constexpr size_t kMostNames = 10;

}  // namespace

void Remarks::on_answer(const Join& join, const Message& answer) {
  if (const auto* refusal = std::get_if<Refuse>(&answer)) {
    const std::string who = fmt::format("{} ({}): {}", join.host, join.address, refusal->reason);
    note_refusal(who);
    lines_.push_back("refused " + who);
  } else if (const auto* wait = std::get_if<Wait>(&answer)) {
    if (told_to_wait_.size() >= kMostTold) told_to_wait_.clear();
    if (!told_to_wait_.insert(join.launcher).second) return;
    lines_.push_back(fmt::format("{} ({}) has to wait: {}", join.host, join.address, wait->reason));
  }
}

void Remarks::on_spare(const Join& join, size_t places) {
  lines_.push_back(
      fmt::format("{} ({}) is a spare: all {} places are taken", join.host, join.address, places));
}

void Remarks::on_notified(const Join& join) {
  lines_.push_back(fmt::format("{} ({}) has to wait: the ranks have been told of a preemption",
                               join.host, join.address));
}

void Remarks::on_late(size_t hosts, const std::vector<std::string>& late, const Timing& timing) {
  const std::vector<std::string> first(
      late.begin(), late.begin() + static_cast<int>(std::min(late.size(), kMostNames)));
  lines_.push_back(fmt::format(
      "all ranks of {} of {} hosts have exited with status 0; still running after {:g} s: {}{}",
      hosts - late.size(), hosts, seconds(timing.late), fmt::join(first, ", "),
      late.size() > first.size() ? fmt::format(" and {} more", late.size() - first.size()) : ""));
}

void Remarks::on_gathering(Time now) {
  due_ = now + kQuiet;
  last_.clear();
}

void Remarks::on_waiting(const Gathered& gathered, const JobSpec& job_spec, const Timing& timing,
                         Time now) {
  if (now < due_) return;
  due_ = now + kBetween;
  std::string line = "waiting at " + gathered.where;
  if (gathered.ready < static_cast<size_t>(job_spec.min_nodes)) {
    line +=
        fmt::format(": {} of {} hosts have come ({}); for {:g} s in all (--rdzv-conf join_timeout)",
                    gathered.ready, job_spec.min_nodes, gathered.who, seconds(timing.join));
  } else if (gathered.is_fenced) {
    line += " until no rank of the last start can be alive on a host that was lost";
  } else {
    line += fmt::format(
        ": {} hosts have come, {} may; starting without more after {:g} s (--rdzv-conf "
        "last_call_timeout)",
        gathered.ready, job_spec.max_nodes, seconds(timing.last_call));
  }
  if (line != last_) lines_.push_back(line);
  last_ = std::move(line);
}

std::string words_for_a_spare(size_t places) {
  return fmt::format(
      "all {} places of the job are taken: this launcher is a spare, and starts when a host is "
      "lost",
      places);
}

std::string words_for_the_notified() {
  return "the ranks of the job have been told of a preemption (SIGUSR1): no host joins them, and "
         "this launcher starts only if they are started again";
}

std::string successors(const std::map<uint64_t, std::string>& before,
                       const std::map<uint64_t, std::string>& now) {
  std::vector<std::string> gone, come;
  for (const auto& [launcher, host] : before) {
    if (!now.contains(launcher)) gone.push_back(host);
  }
  for (const auto& [launcher, host] : now) {
    if (!before.contains(launcher)) come.push_back(host);
  }
  if (gone.empty() || come.empty() || gone.size() + come.size() > kMostNames) return "";
  return fmt::format("; {} in place of {}", fmt::join(come, ", "), fmt::join(gone, ", "));
}

}  // namespace lockstep::launch
