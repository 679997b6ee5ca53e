// A run's log, read: its series thinned to a size that does not depend on its length. Needs no
// torch.
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/train/run_log.h"

namespace lockstep::train {

// A value over several reports together.
struct Point {
  int64_t first = 0, last = 0;           // their steps
  int64_t count = 0;                     // how many of them are numbers
  double mean = 0, least = 0, most = 0;  // of these; NaN where none is
  double weight = 0;                     // of these in means, the sum
};

// Both as one; `b` is the later one.
Point joined(const Point& a, const Point& b);

// A value over steps, in at most 2 * `most` points: when there are more, neighbours are joined.
class Series {
 public:
  // Keeps at most 2 * `most` points.
  explicit Series(size_t most = 256) : most_(most) {}

  // Steps come in ascending order. `weight`, above 0: how much the value counts in means.
  void add(int64_t step, double value, double weight = 1);
  // Forgets what came after `step`, which a restarted run makes again.
  void cut(int64_t step);

  // In the order of steps.
  const std::vector<Point>& points() const { return points_; }
  // Whether there is no point.
  bool empty() const { return points_.empty(); }
  // Reports whose value was NaN or infinite, and the step of the first.
  int64_t not_finite() const { return not_finite_; }
  int64_t first_not_finite() const { return first_not_finite_; }

 private:
  size_t most_;
  int64_t reports_per_point_ = 1, in_last_ = 0;
  std::vector<Point> points_;
  int64_t not_finite_ = 0, first_not_finite_ = -1;
  std::vector<int64_t> last_not_finite_;  // steps of the newest of them, which a cut takes back
};

// What the ranks did over some steps: a column of a heat map.
struct RankColumn {
  int64_t first = 0, last = 0;
  int64_t reports = 0;
  std::vector<float> working_seconds;  // by rank, the mean of a step
  std::vector<float> memory_bytes;     // by rank, the most
  std::vector<float> gpu_busy;         // by rank, the mean; NaN where it is not known

  // Adds the column that follows it, of as many ranks.
  void join(const RankColumn& next);
};

// What the ranks did over the whole run, or since a restart on another number of ranks: with fewer
// of them each has more to do, and none of them is slow for that.
struct RankTotals {
  double step_seconds = 0, communication_seconds = 0, data_seconds = 0, checkpoint_seconds = 0;
  int64_t steps = 0;
  int64_t first_memory = 0, last_memory = 0;  // of the last start
  int64_t most_memory = 0;
  double gpu_busy = 0;  // a sum, of as many reports as know of a GPU
  int64_t gpu_reports = 0;

  // All but waiting for others and sending.
  double working_seconds() const { return step_seconds - communication_seconds; }
};

// For a run that learns one domain after another: the mean reward of each after each stage.
struct Transfer {
  // One domain's after some stages.
  struct Cell {
    double reward = 0;
    std::string interval;  // "0.31 to 0.42"
  };
  std::vector<std::string> domains;
  std::vector<std::vector<Cell>> rows;                       // after 0, 1, ... stages
  std::vector<std::pair<std::string, std::string>> figures;  // "forgetting", "0.120 (0.08 to 0.16)"
};

// What is in a run's log: of several runs that wrote there one after another, the last one.
struct RunHistory {
  static constexpr size_t kMostEvents = 1000;
  static constexpr size_t kMostNames = 64;
  static constexpr size_t kMostRanks = 65536;

  std::string path;
  std::vector<RunStart> starts;     // the first ones of very many
  std::vector<double> start_times;  // of these, seconds since 1970
  std::optional<RunEnd> end;        // of the last start
  std::optional<StepReport> last;
  double first_time = 0, last_time = 0;  // seconds since 1970
  double idle_seconds = 0;               // between an end or the last sign of life and a restart
  int64_t earlier_runs = 0;              // in the same file
  double longest_wait = 0;  // for a report, in seconds, since the last start; 0: none came yet

  Series loss;  // shown_loss() of the reports, which count as their samples or steps do
  Series learning_rate, gradient_norm, samples_per_second;
  Series step_seconds;  // of a step, the mean over ranks
  Series communication_share, data_share, checkpoint_share;
  std::map<std::string, Series> evaluations, values;  // at most kMostNames each
  std::vector<RankColumn> columns;
  std::vector<RankTotals> ranks;
  std::vector<Event> events;  // at most kMostEvents, the first and the last ones
  int64_t events_left_out = 0;
  int64_t reports = 0;

  std::optional<Transfer> transfer;  // what metrics.json beside the log has, where there is one

  int64_t lines = 0;
  int64_t skipped_lines = 0;  // damaged, or of an unknown type
  std::string first_fault;    // of them: "line 17: not a JSON object"

  // The step that the run has come to, as far as the log says; 0: none yet.
  int64_t last_step() const;
  double working_seconds() const;  // in which some process was at work
  // Takes in what a line of the log says; `time` is its time, in seconds since 1970.
  void add(const LogRecord& record, double time);

 private:
  void add_start(const RunStart& start, double time);
  void add_ranks(const StepReport& report);
  // Joins it to the newest column, or makes the columns fewer, where there are many.
  void add_column(RankColumn column);
  void add_event(const Event& event);
  int64_t reports_per_column_ = 1;
  int64_t samples_ = 0;        // of the last report of this start
  double waits_since_ = 0;     // seconds since 1970
  bool is_restarted_ = false;  // since the last report of ranks
};

// Reads a log while it grows, in memory that does not depend on its length. What is in it is
// checked: lines that are damaged, longer than kLongestLine or of unknown types are skipped and
// counted.
class RunLogReader {
 public:
  static constexpr size_t kLongestLine = size_t{16} << 20;

  // `path` is the file, or the folder with metrics.jsonl in it. Throws Error when it cannot be
  // opened, with what to do.
  explicit RunLogReader(const std::string& path);

  // Takes what was added since the last call, up to the last whole line; whether there was
  // anything. Throws Error for a log of a later version.
  bool poll(RunHistory& history);
  // As poll(), with a last line that has no line feed.
  void finish(RunHistory& history);

  // The path of the file.
  const std::string& path() const { return path_; }

 private:
  void take(std::string_view line, RunHistory& history);

  std::string path_;
  std::ifstream file_;
  std::string rest_;       // the beginning of a line
  bool too_long_ = false;  // its beginning was dropped
};

// One line as log_line() writes it; `unix_seconds` becomes when it was made. Nothing when it is
// damaged or of an unknown type, with the reason in `fault`. Throws Error for a later version.
std::optional<LogRecord> parse_log_line(std::string_view line, double& unix_seconds,
                                        std::string& fault);

// A whole log. Throws Error when there is none, or nothing in it is a log's.
RunHistory read_run(const std::string& path);

}  // namespace lockstep::train
