#include "lockstep/train/run_warnings.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "train/report/loss_scale.h"
#include "train/report/ranks.h"
#include "train/report/text.h"

namespace lockstep::train {
namespace {

// Reports at the start of which memory and losses are not typical yet.
constexpr int64_t kFirst = 3;
constexpr int kGrowing = 4;
constexpr const char* kCureOfLoss =
    "Lower the learning rate, clip gradients (training.max_grad_norm), look for bad samples; "
    "with float16 try bfloat16.";

template <class Value>
std::vector<double> column(const StepReport& report, const Value& value) {
  std::vector<double> all;
  for (const auto& rank : report.ranks) all.push_back(value(rank));
  return all;
}

}  // namespace

bool RunWarnings::say(const std::string& trouble, Event event, Events& events) {
  const auto said = said_.find(trouble);
  if (said != said_.end() && event.seconds - said->second < limits_.quiet_seconds) return false;
  said_[trouble] = event.seconds;
  event.kind = "warning";
  events.push_back(std::move(event));
  return true;
}

void RunWarnings::look_at_loss(const StepReport& report, std::string_view parameter,
                               Events& events) {
  const std::string where =
      parameter.empty() ? "" : fmt::format("; the first parameter is {}", parameter);
  if (report.loss && !std::isfinite(*report.loss)) {
    say("loss",
        {.step = report.step,
         .seconds = report.seconds,
         .text = fmt::format("the loss is {} at step {}{}",
                             std::isnan(*report.loss) ? "NaN" : "infinite",
                             with_commas(report.step), where),
         .advice = kCureOfLoss},
        events);
    said_["gradient"] = report.seconds;  // which comes of it
    return;
  }
  if (!parameter.empty() || (report.gradient_norm && !std::isfinite(*report.gradient_norm))) {
    say("gradient",
        {.step = report.step,
         .seconds = report.seconds,
         .text =
             fmt::format("a gradient is not finite at step {}{}", with_commas(report.step), where),
         .advice = kCureOfLoss},
        events);
  }
  if (report.shown_loss() && std::isfinite(*report.shown_loss())) {
    look_for_explosion(report, *report.shown_loss(), events);
  }
  if (report.gradient_norm && std::isfinite(*report.gradient_norm)) {
    look_for_jump(report, *report.gradient_norm, events);
  }
}

void RunWarnings::look_for_explosion(const StepReport& report, double loss, Events& events) {
  LossesSeen seen{.first = first_loss_, .best = best_loss_, .change = loss_change_};
  if (losses_ >= kFirst && loss - best_loss_ > limits_.exploding_loss * usual_distance(seen)) {
    say("explosion",
        {.step = report.step,
         .seconds = report.seconds,
         .text = fmt::format("the loss has exploded: {:.4g} at step {}, after {:.4g} at best", loss,
                             with_commas(report.step), best_loss_),
         .advice = kCureOfLoss},
        events);
  }
  if (losses_ == 0) first_loss_ = best_loss_ = last_loss_ = loss;
  best_loss_ = std::min(best_loss_, loss);
  seen.add_change(loss - last_loss_);
  loss_change_ = seen.change;
  last_loss_ = loss;
  ++losses_;
}

void RunWarnings::look_for_jump(const StepReport& report, double norm, Events& events) {
  if (gradients_ >= 2 * kFirst && norm > limits_.exploding_gradient * gradient_norm_ &&
      gradient_norm_ > 0) {
    say("explosion",
        {.step = report.step,
         .seconds = report.seconds,
         .text = fmt::format("the gradient norm has jumped to {:.4g} at step {}, from {:.4g}", norm,
                             with_commas(report.step), gradient_norm_),
         .advice = kCureOfLoss},
        events);
    return;  // the mean stays that of good steps
  }
  gradient_norm_ = gradients_ == 0 ? norm : 0.9 * gradient_norm_ + 0.1 * norm;
  ++gradients_;
}

void RunWarnings::look_at_times(const StepReport& report, Events& events) {
  double total = 0, data = 0;
  for (const auto& rank : report.ranks) {
    total += rank.step_seconds;
    data += rank.data_seconds;
  }
  const bool starves = total > 0 && data > limits_.data_share * total;
  if (starves && starved_) {
    say("data",
        {.step = report.step,
         .seconds = report.seconds,
         .text = fmt::format("training waits for data {:.0f} % of the time", 100 * data / total),
         .advice = "Use more loader threads (workers), prefetch, cheaper transforms, or data on a "
                   "faster disk."},
        events);
  }
  starved_ = starves;
  if (report.ranks.size() < 2) return;

  const auto working = column(report, [](const auto& r) { return r.working_seconds(); });
  const size_t slowest = largest(working);
  const double others = median_without(working, slowest);
  const bool is_slow = others > 0 && working[slowest] > limits_.straggler * others &&
                       working[slowest] - others > limits_.straggler_seconds;
  if (is_slow && slow_rank_ == static_cast<int>(slowest)) {
    const RankFigures& rank = report.ranks[slowest];
    const auto extra = [&](const auto& value) {
      const auto all = column(report, value);
      return all[slowest] - median_without(all, slowest);
    };
    const double in_data = extra([](const auto& r) { return r.data_seconds; });
    const double in_compute = extra([](const auto& r) { return r.compute_seconds(); });
    const double in_saving = extra([](const auto& r) { return r.checkpoint_seconds; });
    const char* what = "computes";
    const char* advice =
        "Look for other programs on its host, a core or GPU that is throttled, threads that share "
        "cores (lockstep run --bind cores), or for more work than the others have: larger batches, "
        "longer texts.";
    if (in_data > in_compute && in_data >= in_saving) {
      what = "waits for data";
      advice = "Look at its disk and its loader threads; do all ranks have equally much to read?";
    } else if (in_saving > in_compute) {
      what = "saves";
      advice =
          "Save asynchronously (checkpoint.async) or, in three_domain, less often (--save-every), "
          "or "
          "look at its disk.";
    }
    say("straggler",
        {.step = report.step,
         .seconds = report.seconds,
         .rank = static_cast<int>(slowest),
         .text = fmt::format("rank {} works {:.1f} ms a step, the others {:.1f} ms ({:.2f} times): "
                             "it {} for longer, and all wait for it",
                             slowest, 1e3 * rank.working_seconds(), 1e3 * others,
                             working[slowest] / others, what),
         .advice = advice},
        events);
  }
  slow_rank_ = is_slow ? static_cast<int>(slowest) : -1;
}

void RunWarnings::look_at_memory(const StepReport& report, Events& events) {
  const auto bytes =
      column(report, [](const auto& r) { return static_cast<double>(r.memory_bytes); });
  if (bytes.size() >= 2) {
    const size_t most = largest(bytes);
    const double others = median_without(bytes, most);
    if (others > 0 && bytes[most] > limits_.memory_imbalance * others &&
        bytes[most] - others > static_cast<double>(limits_.memory_imbalance_bytes)) {
      say("imbalance",
          {.step = report.step,
           .seconds = report.seconds,
           .rank = static_cast<int>(most),
           .text = fmt::format("rank {} has {} of memory, the others {}", most,
                               memory_text(bytes[most]), memory_text(others)),
           .advice = "Look for what that rank alone does: gathered metrics, logging, evaluation, "
                     "longer samples."},
          events);
    }
  }
  if (memory_.size() != report.ranks.size()) memory_.assign(report.ranks.size(), {});
  for (size_t rank = 0; rank < memory_.size(); ++rank) {
    Memory& memory = memory_[rank];
    const int64_t now = report.ranks[rank].memory_bytes;
    if (++memory.reports <= kFirst) memory.base = now;
    memory.grown = memory.reports > kFirst && now > memory.last ? memory.grown + 1 : 0;
    memory.last = now;
    const bool leaks =
        memory.grown >= kGrowing && memory.base > 0 &&
        static_cast<double>(now) > limits_.memory_growth * static_cast<double>(memory.base) &&
        now - memory.base > limits_.memory_growth_bytes;
    if (!leaks) continue;
    const bool said = say(
        "leak",
        {.step = report.step,
         .seconds = report.seconds,
         .rank = static_cast<int>(rank),
         .text = fmt::format("rank {}'s memory grows: {}, after {} at the start", rank,
                             memory_text(static_cast<double>(now)),
                             memory_text(static_cast<double>(memory.base))),
         .advice = "Look for tensors that are kept from step to step: losses that are added up "
                   "without item() or detach() keep their whole graph. If there are none, it is "
                   "malloc's fragments: see --memory-allocator in docs/launching.md."},
        events);
    if (said) memory.base = now;
  }
}

void RunWarnings::look_at_gpus(const StepReport& report, Events& events) {
  double busy = 0, known = 0, total = 0, communication = 0;
  for (const auto& rank : report.ranks) {
    total += rank.step_seconds;
    communication += rank.communication_seconds;
    if (rank.gpu_busy < 0) continue;
    busy += rank.gpu_busy;
    ++known;
  }
  const bool idles = known > 0 && busy < limits_.gpu_busy * known;
  // Where training waits for data, that is said already.
  if (idles && idled_ && !starved_) {
    const bool talks = communication > 0.4 * total;
    say("gpu",
        {.step = report.step,
         .seconds = report.seconds,
         .text = fmt::format("the GPUs compute only {:.0f} % of the time{}", 100 * busy / known,
                             talks ? fmt::format("; the ranks wait for each other {:.0f} % of it",
                                                 100 * communication / total)
                                   : ""),
         .advice = talks
                       ? "Use larger batches, accumulation (training.gradient_accumulation_steps) "
                         "or a communication hook (parallel.hook)."
                       : "Use larger batches (training.batch_size), and leave out what waits for "
                         "the GPU in each step: item(), cpu(), printing a tensor."},
        events);
  }
  idled_ = idles;
}

std::vector<Event> RunWarnings::look(const StepReport& report, std::string_view parameter) {
  Events events;
  look_at_loss(report, parameter, events);
  if (report.ranks.empty()) return events;
  look_at_times(report, events);
  look_at_gpus(report, events);
  look_at_memory(report, events);
  return events;
}

}  // namespace lockstep::train
