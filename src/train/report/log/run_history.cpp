// What a log's records add up to.
#include "lockstep/train/run_history.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "train/report/text.h"

namespace lockstep::train {
namespace {

// How many numbers a heat map may have, on any number of ranks.
constexpr size_t kMostCells = size_t{1} << 17;
constexpr size_t kMostKeptColumns = 256, kFewestColumns = 8;
constexpr size_t kMostStarts = 1000;

size_t most_columns(size_t ranks) {
  return std::clamp(kMostCells / std::max<size_t>(ranks, 1), kFewestColumns, kMostKeptColumns);
}

float mean_of(float a, int64_t of_a, float b, int64_t of_b) {
  const auto both = static_cast<float>(of_a + of_b);
  return a * (static_cast<float>(of_a) / both) + b * (static_cast<float>(of_b) / both);
}

// Of what may be unknown.
float known_mean(float a, int64_t of_a, float b, int64_t of_b) {
  if (std::isnan(a)) return b;
  return std::isnan(b) ? a : mean_of(a, of_a, b, of_b);
}

void add_to(std::map<std::string, Series>& all, const std::map<std::string, double>& values,
            int64_t step) {
  for (const auto& [name, value] : values) {
    if (all.size() >= RunHistory::kMostNames && !all.contains(name)) continue;
    all[name].add(step, value);
  }
}

}  // namespace

void RankColumn::join(const RankColumn& next) {
  for (size_t rank = 0; rank < working_seconds.size(); ++rank) {
    working_seconds[rank] =
        mean_of(working_seconds[rank], reports, next.working_seconds[rank], next.reports);
    memory_bytes[rank] = std::max(memory_bytes[rank], next.memory_bytes[rank]);
    gpu_busy[rank] = known_mean(gpu_busy[rank], reports, next.gpu_busy[rank], next.reports);
  }
  last = next.last;
  reports += next.reports;
}

void RunHistory::add_ranks(const StepReport& report) {
  const size_t count = std::min(report.ranks.size(), kMostRanks);
  if (count == 0) return;
  if (std::exchange(is_restarted_, false)) {
    if (ranks.size() != count) ranks.assign(count, {});
    for (RankTotals& totals : ranks) totals.first_memory = 0;  // of other processes
  }
  if (ranks.size() < count) ranks.resize(count);
  RankColumn column{report.step, report.step, 1, {}, {}, {}};
  double step = 0, communication = 0, data = 0, checkpoint = 0;
  for (size_t i = 0; i < count; ++i) {
    const RankFigures& figures = report.ranks[i];
    RankTotals& totals = ranks[i];
    const auto steps = static_cast<double>(report.steps);
    totals.step_seconds += figures.step_seconds * steps;
    totals.communication_seconds += figures.communication_seconds * steps;
    totals.data_seconds += figures.data_seconds * steps;
    totals.checkpoint_seconds += figures.checkpoint_seconds * steps;
    totals.steps += report.steps;
    if (totals.first_memory == 0) totals.first_memory = figures.memory_bytes;
    totals.last_memory = figures.memory_bytes;
    totals.most_memory = std::max(totals.most_memory, figures.memory_bytes);
    column.working_seconds.push_back(static_cast<float>(figures.working_seconds()));
    column.memory_bytes.push_back(static_cast<float>(figures.memory_bytes));
    const bool has_gpu = figures.gpu_busy >= 0;
    column.gpu_busy.push_back(has_gpu ? static_cast<float>(figures.gpu_busy) : NAN);
    totals.gpu_busy += has_gpu ? figures.gpu_busy : 0;
    totals.gpu_reports += has_gpu;
    step += figures.step_seconds;
    communication += figures.communication_seconds;
    data += figures.data_seconds;
    checkpoint += figures.checkpoint_seconds;
  }
  step_seconds.add(report.step, step / static_cast<double>(count));
  if (step > 0) {
    communication_share.add(report.step, communication / step);
    data_share.add(report.step, data / step);
    checkpoint_share.add(report.step, checkpoint / step);
  }
  add_column(std::move(column));
}

void RunHistory::add_column(RankColumn column) {
  const size_t count = column.working_seconds.size();
  // A restart on another number of ranks begins a new column.
  const bool fits = !columns.empty() && columns.back().working_seconds.size() == count;
  if (fits && columns.back().reports < reports_per_column_) {
    columns.back().join(column);
    return;
  }
  if (columns.size() >= 2 * most_columns(count)) {
    std::vector<RankColumn> halved;
    for (auto& one : columns) {
      const bool joins = !halved.empty() && halved.back().reports <= reports_per_column_ &&
                         one.reports <= reports_per_column_ &&
                         halved.back().working_seconds.size() == one.working_seconds.size();
      if (joins) {
        halved.back().join(one);
      } else {
        halved.push_back(std::move(one));
      }
    }
    // Ranks whose number changes again and again: the newest remain.
    if (halved.size() >= 2 * most_columns(count)) halved.erase(halved.begin(), halved.end() - 8);
    columns = std::move(halved);
    reports_per_column_ *= 2;
  }
  columns.push_back(std::move(column));
}

void RunHistory::add_event(const Event& event) {
  if (events.size() >= kMostEvents) {
    events.erase(events.begin() + kMostEvents / 2);
    ++events_left_out;
  }
  events.push_back(event);
}

// One that neither resumes nor is a launcher's restart is another run, begun in the same folder.
void RunHistory::add_start(const RunStart& start, double time) {
  if (!starts.empty() && start.resumed_at < 0 && start.restart == 0) {
    RunHistory next;
    next.path = std::move(path);
    next.transfer = std::move(transfer);
    next.lines = lines;
    next.skipped_lines = skipped_lines;
    next.first_fault = std::move(first_fault);
    next.earlier_runs = earlier_runs + 1;
    next.first_time = time;
    *this = std::move(next);
  }
  end.reset();
  samples_ = 0;
  longest_wait = 0;
  waits_since_ = time;
  const int64_t from = std::max<int64_t>(start.resumed_at, 0);
  if (!starts.empty()) {
    is_restarted_ = true;
    idle_seconds += std::max(0.0, time - last_time);
    for (Series* series : {&loss, &learning_rate, &gradient_norm, &samples_per_second,
                           &step_seconds, &communication_share, &data_share, &checkpoint_share}) {
      series->cut(from);
    }
    for (auto* all : {&evaluations, &values}) {
      for (auto& [name, series] : *all) series.cut(from);
    }
    while (!columns.empty() && columns.back().first > from) columns.pop_back();
    const std::string how = start.restart > 0 ? "started again" : "resumed";
    const std::string where = start.resumed_at >= 0
                                  ? " from the checkpoint of step " + with_commas(from)
                                  : " from the beginning";
    add_event({.kind = "restart", .step = from, .text = how + where});
  }
  if (starts.size() >= kMostStarts) return;
  starts.push_back(start);
  start_times.push_back(time);
}

void RunHistory::add(const LogRecord& record, double time) {
  if (first_time == 0) first_time = time;
  if (const auto* start = std::get_if<RunStart>(&record)) {
    add_start(*start, time);
  } else if (const auto* report = std::get_if<StepReport>(&record)) {
    ++reports;
    longest_wait = std::max(longest_wait, time - std::exchange(waits_since_, time));
    const int64_t taken = report->samples - std::exchange(samples_, report->samples);
    if (const auto& value = report->shown_loss()) {
      loss.add(report->step, *value,
               static_cast<double>(taken > 0 ? taken : std::max<int64_t>(report->steps, 1)));
    }
    if (report->learning_rate) learning_rate.add(report->step, *report->learning_rate);
    if (report->gradient_norm) gradient_norm.add(report->step, *report->gradient_norm);
    samples_per_second.add(report->step, report->samples_per_second);
    add_to(values, report->values, report->step);
    add_ranks(*report);
    if (report->ranks.empty() && last && !is_restarted_) {
      // The last report of a run that failed.
      std::vector<RankFigures> before = std::move(last->ranks);
      last = *report;
      last->ranks = std::move(before);
    } else {
      last = *report;
    }
  } else if (const auto* evaluation = std::get_if<EvaluationReport>(&record)) {
    // One that a run had made after its checkpoint, and makes again where it resumes.
    for (const auto& [name, value] : evaluation->metrics) {
      const auto before = evaluations.find(name);
      if (before != evaluations.end()) before->second.cut(evaluation->step - 1);
    }
    add_to(evaluations, evaluation->metrics, evaluation->step);
  } else if (const auto* event = std::get_if<Event>(&record)) {
    add_event(*event);
  } else if (const auto* ended = std::get_if<RunEnd>(&record)) {
    end = *ended;
  }
  last_time = time;
}

double RunHistory::working_seconds() const {
  return std::max(0.0, last_time - first_time - idle_seconds);
}

int64_t RunHistory::last_step() const {
  return std::max(last ? last->step : 0, end ? end->step : 0);
}

}  // namespace lockstep::train
