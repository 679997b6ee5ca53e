// The log of a run: what happened in it, one JSON object a line in a file called metrics.jsonl.
// docs/metrics.md is its schema. Needs no torch.
//
//   RunLog file("runs/a/metrics.jsonl");
//   file.append(RunStart{.ranks = 4});
//   file.append(StepReport{.step = 50, .loss = 0.31});
//
// RunMonitor (lockstep/train/monitor.h) fills it from a training loop on many ranks.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::train {

// Files of later versions are refused.
inline constexpr int kRunLogVersion = 1;

// What one rank did in the steps since the report before. Times are means over these steps, in
// seconds.
struct RankFigures {
  double step_seconds = 0;           // from the end of a step to the end of the next
  double communication_seconds = 0;  // of it, blocked in collectives
  double data_seconds = 0;           // of it, waiting for batches
  double checkpoint_seconds = 0;     // of it, held up by saving
  int64_t memory_bytes = 0;          // resident, at the report
  double gpu_busy = -1;              // share of the time in which its GPU computed; -1: not known

  // What is left.
  double compute_seconds() const;
  // Without waiting for other ranks: in a synchronous step all ranks take equally long, and the
  // slow one is the one that worked all the time.
  double working_seconds() const;
};

// A process began to train: once for a run, and once more for each restart.
struct RunStart {
  int ranks = 1;
  std::string name = {};                                // of the program or model
  int64_t resumed_at = -1;                              // the step that was restored; -1: none
  int64_t total_steps = 0;                              // that the run will have; 0: not known
  int restart = 0;                                      // how often the job was restarted before
  std::map<std::string, std::string> config = {};       // "training.seed" -> "3"
  std::map<std::string, std::string> environment = {};  // "libtorch" -> "2.15.0"
  std::vector<std::string> hosts = {};                  // by rank
};

// The steps since the report before.
struct StepReport {
  int64_t step = 0;                                // made so far
  int64_t steps = 1;                               // that this report is about
  int64_t epoch = 0;                               // from 0
  double seconds = 0;                              // since this process began to train
  std::optional<double> loss = std::nullopt;       // of the last step, the mean over all ranks
  std::optional<double> mean_loss = std::nullopt;  // of all these steps
  std::optional<double> learning_rate = std::nullopt;
  std::optional<double> gradient_norm = std::nullopt;  // before it was clipped
  int64_t samples = 0;                                 // so far, on all ranks
  double samples_per_second = 0;
  std::map<std::string, double> values = {};  // other values that the program reports
  std::vector<RankFigures> ranks = {};        // by rank
  // A JSON object of the program's own, or nothing. The line has its keys, too, but for those that
  // it has without.
  std::string keys = {};

  // What is shown and exported as the loss: the mean of all these steps where it is known,
  // otherwise that of the last step.
  const std::optional<double>& shown_loss() const { return mean_loss ? mean_loss : loss; }
};

// Metrics of an evaluation.
struct EvaluationReport {
  int64_t step = 0;
  double seconds = 0;
  std::map<std::string, double> metrics = {};
};

// Something that happened once.
struct Event {
  // "save", "restore", "restart", "warning", "fault", "preemption", or a kind of the program's own.
  std::string kind;
  int64_t step = 0;
  double seconds = 0;
  int rank = -1;  // the one it is about; -1: all
  std::string text = {};
  std::string advice = {};  // what to do about a warning
};

// The process trains no more.
struct RunEnd {
  int64_t step = 0;
  double seconds = 0;
  std::string outcome = {};  // "finished", "preempted", or what the exception said
  bool failed = false;
};

// A line of the file.
using LogRecord = std::variant<RunStart, StepReport, EvaluationReport, Event, RunEnd>;

// The record as strict JSON without a line feed. Numbers that JSON does not have are the strings
// "NaN", "Infinity" and "-Infinity"; bytes that are not UTF-8 become U+FFFD. `unix_seconds` is when
// it was made.
std::string log_line(const LogRecord& record, double unix_seconds);

class RecordQueue;

// Appends to a file, by a thread of its own: append() never waits for the disk. Every line is
// written whole; one that was cut (a full disk, an end of the process before) is ended by a line
// feed before the next, so that a reader loses that line alone. A disk that takes nothing is warned
// of once, and training continues; when it takes lines again, an event says how many are missing.
// Of more than 4,096 records that wait for the disk the oldest are dropped and counted in the same
// way. A process that ends by exit() or abort(), or dies of a fault of its own, writes what it has
// appended before, unless the disk takes longer than a second.
class RunLog {
 public:
  // Makes the folder, too. Throws Error when the file cannot be opened.
  explicit RunLog(const std::string& path);
  // flush(), for at most 1 s: a disk that hangs holds up no process.
  ~RunLog();
  RunLog(const RunLog&) = delete;
  RunLog& operator=(const RunLog&) = delete;

  // From any thread; never blocks and never throws for the disk's sake.
  void append(LogRecord record);
  // Returns when all that was appended has been given to the operating system, or after `timeout`.
  // Whether it has.
  bool flush(std::chrono::milliseconds timeout = std::chrono::seconds(10));

 private:
  std::unique_ptr<RecordQueue> queue_;
};

}  // namespace lockstep::train
