// A run in words.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <vector>

#include "lockstep/train/run_report.h"
#include "lockstep/train/run_warnings.h"
#include "train/report/loss_scale.h"
#include "train/report/losses.h"
#include "train/report/ranks.h"
#include "train/report/text.h"

namespace lockstep::train {
namespace {

using Tone = Finding::Tone;

// From where on a word of blame is said; as WarningLimits has them.
constexpr double kSlow = 1.25, kStarving = 0.25, kTalking = 0.4, kSaving = 0.15, kIdle = 0.4;
constexpr double kImbalance = 1.5, kGrowth = 1.2;
constexpr double kLeastBytes = 64 << 20;
// A fall of the loss by less, as a share of it, is none.
constexpr double kNoFall = 1e-4;
// A rise of an evaluation's loss by less, as a share of the best one or of what it fell before, is
// none; the last so many evaluations have to show it.
constexpr double kRise = 0.1, kSmallRise = 0.01;
constexpr std::ptrdiff_t kLate = 3;
constexpr size_t kLongText = 300, kLongError = 2000;  // bytes

// How often a launcher started it again.
size_t restarts_of(const RunHistory& run) {
  if (run.starts.empty()) return 0;
  return static_cast<size_t>(std::count_if(run.starts.begin() + 1, run.starts.end(),
                                           [](const RunStart& one) { return one.restart > 0; }));
}

// " It was restarted 2 times and resumed once. Nothing ran for 3 h between." A start
// that is not a launcher's restart resumed the run by hand.
std::string history_text(const RunHistory& run, size_t restarts) {
  const size_t again = run.starts.empty() ? 0 : run.starts.size() - 1;
  std::string text;
  const auto add = [&text](const char* what, size_t times) {
    if (times == 0) return;
    text += fmt::format("{}{} {}", text.empty() ? " It was " : " and ", what,
                        times == 1 ? "once" : fmt::format("{} times", times));
  };
  add("restarted", restarts);
  add("resumed", again - restarts);
  if (!text.empty()) text += '.';
  if (run.idle_seconds >= 1) {
    text += fmt::format(" Nothing ran for {} between.", long_time(run.idle_seconds));
  }
  if (run.earlier_runs > 0) {
    text += fmt::format(" The log has {} earlier run{}, not shown here.", run.earlier_runs,
                        run.earlier_runs == 1 ? "" : "s");
  }
  return text;
}

Finding ending(const RunHistory& run) {
  const std::string steps = run.last_step() > 0 ? counted(run.last_step(), "step") : "no step";
  const std::string time = long_time(run.working_seconds());
  const size_t restarts = restarts_of(run);
  const std::string again = history_text(run, restarts);
  if (!run.end) {
    return {Tone::Plain, "Still running, or killed",
            fmt::format("The log has no end. It has come to {} in {}.{}", steps, time, again)};
  }
  if (run.end->failed) {
    return {Tone::Bad, "The run failed",
            fmt::format("After {} and {}: {}{}", steps, time,
                        shortened(run.end->outcome, kLongError), again)};
  }
  const std::string& outcome = run.end->outcome;
  const std::string after = fmt::format("After {} in {}.", steps, time);
  if (outcome == "preempted") {
    return {
        Tone::Plain, "The run was preempted",
        after +
            " Started again with checkpoint.resume: latest (Saving::resume in C++, --resume for "
            "reinforcement learning), it goes on from its last checkpoint." +
            again};
  }
  if (outcome == "stopped" || outcome == "time limit") {
    return {Tone::Plain,
            outcome == "stopped" ? "The program stopped the run" : "The run came to its time limit",
            after + again};
  }
  if (run.last_step() == 0) {
    return {Tone::Plain, "The run made no step", fmt::format("It ended after {}.{}", time, again)};
  }
  if (outcome == "early stopping") {
    return {Tone::Good, "The run stopped early",
            after + " The metric had not become better any more." + again};
  }
  return {restarts == 0 ? Tone::Good : Tone::Plain,
          restarts == 0 ? "The run finished" : "The run finished after a restart",
          outcome.empty() || outcome == "finished"
              ? fmt::format("It finished after {} in {}.{}", steps, time, again)
              : fmt::format("It ended after {} in {}: {}.{}", steps, time,
                            shortened(outcome, kLongText), again)};
}

void add_learning(const RunHistory& run, std::vector<Finding>& findings) {
  const std::vector<Point> points = losses_of(run);
  if (points.empty()) return;
  if (run.loss.not_finite() > 0) {
    findings.push_back(
        {Tone::Bad, "The loss is not a number",
         fmt::format("From step {} on, in {} of the reports. Lower the learning rate, clip "
                     "gradients, or look for bad samples.",
                     with_commas(run.loss.first_not_finite()), run.loss.not_finite())});
    return;
  }
  const auto by_mean = [](const Point& a, const Point& b) { return a.mean < b.mean; };
  const auto [least, worst] = std::ranges::minmax_element(points, by_mean);
  LossesSeen seen{.first = points.front().mean, .best = least->mean};
  for (auto point = points.begin(); point < least; ++point) {
    seen.add_change(std::next(point)->mean - point->mean);
  }
  const std::vector<Point> means = moving_means(points);
  const auto best = std::ranges::min_element(means, by_mean);
  const double first = points.front().mean, last = means.back().mean;
  const bool falls = first - last > kNoFall * std::abs(first);
  const std::string figures =
      fmt::format("The loss went from {} to {}; the best was {} near step {}.", figure(first),
                  figure(last), figure(best->mean), with_commas(best->last));
  if (points.size() == 1) {
    findings.push_back({Tone::Plain, "Too few reports to see whether it learns",
                        fmt::format("The loss was {}, the mean up to step {}.", figure(first),
                                    with_commas(points.front().last))});
  } else if (points.size() < 3) {
    findings.push_back({Tone::Plain, "Too few reports to see whether it learns", figures});
  } else if (points.back().mean - least->mean > 3 * usual_distance(seen)) {
    findings.push_back({Tone::Bad, "The loss has exploded",
                        figures + " Lower the learning rate, or clip gradients."});
  } else if (!falls && best->mean <= 0 && worst->mean >= 0) {
    findings.push_back({Tone::Plain, "The loss moves around zero",
                        figures + " It does not show by itself whether the model learns."});
  } else if (!falls) {
    findings.push_back({Tone::Bad, "The loss did not fall",
                        figures + " Is the learning rate right, and do labels fit the samples?"});
  } else {
    const double lost = (last - best->mean) / (first - best->mean);
    findings.push_back(
        {lost > 0.25 ? Tone::Plain : Tone::Good,
         lost > 0.25 ? "The training loss fell, and rose again in part" : "The training loss fell",
         figures});
  }
}

// Evaluations of the last stage; of different stages they may be of different data.
std::vector<Point> evaluated_losses(const RunHistory& run) {
  const auto found = run.evaluations.find("loss");
  if (found == run.evaluations.end()) return {};
  int64_t begin = -1;
  for (const Event& event : run.events) {
    if (event.kind == "stage") begin = std::max(begin, event.step);
  }
  std::vector<Point> points = found->second.points();
  // The last one is that of now.
  if (points.empty() || points.back().count == 0) return {};
  std::erase_if(points, [&](const Point& one) { return one.count == 0 || one.first <= begin; });
  return points;
}

// How far a point usually lies from the middle of its neighbours: of a steady rise nothing. There
// are at least three points.
double usual_noise(const std::vector<Point>& points) {
  std::vector<double> distances;
  for (size_t i = 1; i + 1 < points.size(); ++i) {
    distances.push_back(
        std::abs(points[i].mean - (points[i - 1].mean / 2 + points[i + 1].mean / 2)));
  }
  const auto middle = distances.begin() + static_cast<std::ptrdiff_t>((distances.size() - 1) / 2);
  std::ranges::nth_element(distances, middle);
  return *middle;
}

// Whether the loss of training is, as far as it is known, about as good as at `step` or better.
bool training_goes_on(const RunHistory& run, int64_t step) {
  const std::vector<Point> means = moving_means(losses_of(run));
  if (means.empty() || run.loss.not_finite() > 0) return false;
  const auto then = std::ranges::find_if(means, [=](const Point& one) { return one.last >= step; });
  return then == means.end() || means.back().mean - then->mean <= kRise * std::abs(then->mean);
}

bool restores_best(const RunHistory& run) {
  if (run.starts.empty()) return false;
  const auto& config = run.starts.back().config;
  const auto found = config.find("checkpoint.restore_best");
  return found != config.end() && found->second == "true";
}

void add_evaluations(const RunHistory& run, std::vector<Finding>& findings) {
  const std::vector<Point> points = evaluated_losses(run);
  const auto best = std::ranges::min_element(points, {}, &Point::mean);
  if (points.end() - best <= kLate) return;
  double late = 0;
  for (auto one = points.end() - kLate; one < points.end(); ++one) late += one->mean / kLate;
  const double last = points.back().mean;
  const double learned = std::abs(points.front().mean - best->mean);
  const double usual =
      std::max({kRise * std::abs(best->mean), kSmallRise * learned, 4 * usual_noise(points)});
  if (!(std::min(late, last) - best->mean > usual)) return;
  const bool is_restored = restores_best(run);
  const bool stopped = run.end && run.end->outcome == "early stopping";
  const char* const advice = is_restored
                                 ? "checkpoint.restore_best takes the best checkpoint at the end."
                             : stopped ? "See checkpoint.restore_best."
                                       : "See training.early_stopping and checkpoint.restore_best.";
  findings.push_back(
      {is_restored ? Tone::Plain : Tone::Bad, "The evaluation's loss rises",
       fmt::format("It was best ({}) at step {} and is {} now{}. {}", figure(best->mean),
                   with_commas(best->last), figure(last),
                   training_goes_on(run, best->last) ? ": the model overfits" : "", advice)});
}

void add_time(const RunHistory& run, std::vector<Finding>& findings) {
  const Shares shares = shares_of(run);
  if (shares.step <= 0) return;
  const std::string text = fmt::format(
      "A step takes {}: {} computing, {} communication (waits for slower ranks included), {} "
      "waiting for data, {} saving.",
      short_time(shares.step), percent(shares.compute), percent(shares.communication),
      percent(shares.data), percent(shares.checkpoint));
  if (shares.data > kStarving) {
    findings.push_back({Tone::Bad, "Training waits for data",
                        text + " More loader threads or cheaper transforms help."});
  } else if (shares.checkpoint > kSaving) {
    findings.push_back(
        {Tone::Bad, "Saving takes long", text + " Save less often, or asynchronously."});
  } else if (shares.communication > kTalking) {
    findings.push_back({Tone::Plain, "Much of the time is communication",
                        text + " Larger batches, accumulation or a communication hook help, unless "
                               "ranks wait for a slow one."});
  } else {
    findings.push_back(
        {Tone::Good, fmt::format("{} of the time is computing", percent(shares.compute)), text});
  }
}

void add_slow(const RunHistory& run, std::vector<Finding>& findings) {
  if (run.ranks.size() < 2) return;
  const std::vector<double> working = work_of_ranks(run);
  const size_t slowest = largest(working);
  const double others = median_without(working, slowest);
  if (others <= 0) return;
  const double times = working[slowest] / others;
  const double longer = working[slowest] - others;
  if (times > kSlow && longer > WarningLimits{}.straggler_seconds) {
    findings.push_back({Tone::Bad,
                        fmt::format("Rank {} works longest, and all wait for it", slowest),
                        fmt::format("R{} works {} a step, the others {}: {:.2f} times as long.",
                                    rank_of(run, slowest).substr(1), short_time(working[slowest]),
                                    short_time(others), times)});
  } else {
    const bool was_slow = std::ranges::any_of(run.events, [](const Event& event) {
      return event.text.find("for longer, and all wait for it") != std::string::npos;
    });
    findings.push_back(
        {was_slow ? Tone::Plain : Tone::Good,
         was_slow ? "On the mean of the run all ranks work about equally long"
                  : "All ranks work about equally long",
         fmt::format("The slowest, {}, works {} a step longer than the others, {:.2f} times as "
                     "long{}.",
                     rank_of(run, slowest), short_time(longer), times,
                     was_slow        ? "; a warning says which rank was slow for a time"
                     : times > kSlow ? ": a difference that is too short to matter"
                                     : "")});
  }
}

void add_gpus(const RunHistory& run, std::vector<Finding>& findings) {
  double busy = 0, known = 0;
  for (const auto& rank : run.ranks) {
    if (rank.gpu_reports == 0) continue;
    busy += rank.gpu_busy / static_cast<double>(rank.gpu_reports);
    ++known;
  }
  if (known == 0) return;
  busy /= known;
  const std::string text =
      fmt::format("They compute {} of the time, the mean of the ranks.{}", percent(busy),
                  busy >= kIdle ? ""
                                : " Larger batches, more loader threads or "
                                  "fewer small operators help.");
  findings.push_back({busy < kIdle ? Tone::Bad : Tone::Good,
                      busy < kIdle ? "GPUs are idle most of the time" : "GPUs are in use", text});
}

void add_memory(const RunHistory& run, std::vector<Finding>& findings) {
  if (run.ranks.empty()) return;
  std::vector<double> most, growth;
  for (const auto& rank : run.ranks) {
    most.push_back(static_cast<double>(rank.most_memory));
    growth.push_back(static_cast<double>(rank.last_memory - rank.first_memory));
  }
  const size_t top = largest(most), grown = largest(growth);
  if (most[top] <= 0) return;
  const std::string text =
      fmt::format("At most {} on {}.", memory_text(most[top]), rank_of(run, top));
  const RankTotals& leaking = run.ranks[grown];
  if (growth[grown] > kLeastBytes && run.reports > 8 &&
      static_cast<double>(leaking.last_memory) >
          kGrowth * static_cast<double>(leaking.first_memory)) {
    findings.push_back(
        {Tone::Bad, fmt::format("Rank {}'s memory grew", grown),
         fmt::format("R{}'s went from {} to {}. {} Look for tensors that are kept from step to "
                     "step; if there "
                     "are none, it is malloc's fragments: --memory-allocator tcmalloc.",
                     rank_of(run, grown).substr(1),
                     memory_text(static_cast<double>(leaking.first_memory)),
                     memory_text(static_cast<double>(leaking.last_memory)), text)});
  } else if (most.size() > 1 && most[top] > kImbalance * median_without(most, top) &&
             most[top] - median_without(most, top) > kLeastBytes) {
    findings.push_back(
        {Tone::Bad, fmt::format("Rank {} needs more memory than the others", top),
         fmt::format("{} The others have {}.", text, memory_text(median_without(most, top)))});
  } else {
    findings.push_back({Tone::Good, "Memory is even and steady", text});
  }
}

void add_events(const RunHistory& run, std::vector<Finding>& findings) {
  int64_t warnings = 0, faults = 0;
  const Event* last = nullptr;
  for (const Event& event : run.events) {
    warnings += event.kind == "warning";
    faults += event.kind == "fault";
    if (event.kind == "warning" || event.kind == "fault") last = &event;
  }
  if (last != nullptr) {
    findings.push_back(
        {Tone::Bad,
         fmt::format("{} warning{}{}", warnings, warnings == 1 ? "" : "s",
                     faults > 0 ? fmt::format(", {} fault{}", faults, faults == 1 ? "" : "s") : ""),
         fmt::format("The last one, at step {}: {}", with_commas(last->step),
                     shortened(last->text, kLongText))});
  }
  if (run.skipped_lines > 0) {
    findings.push_back({Tone::Plain, "Lines of the log could not be read",
                        fmt::format("{} of {}; the first is {}.", with_commas(run.skipped_lines),
                                    with_commas(run.lines), run.first_fault)});
  }
}

}  // namespace

std::vector<Finding> findings_of(const RunHistory& run) {
  std::vector<Finding> findings{ending(run)};
  add_learning(run, findings);
  add_evaluations(run, findings);
  add_time(run, findings);
  add_slow(run, findings);
  add_gpus(run, findings);
  add_memory(run, findings);
  add_events(run, findings);
  return findings;
}

}  // namespace lockstep::train
