// What a run over several domains learnt, and what it forgot. docs/three_domain_metrics.md has the
// formulas and where they come from.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::rl {

// A 95 % confidence interval.
struct Interval {
  double low = 0;
  double high = 0;
};

// The scores of a run of T stages, one domain each. R[i][j]: the mean reward on that domain's test
// tasks after i stages, 0 <= i <= T; columns in the order of the stages. Nothing where one stage
// alone defines none.
struct ContinualScores {
  double acc = 0;                       // mean of R[T][j]
  std::optional<double> bwt;            // mean over j < T of R[T][j] - R[j][j]
  std::optional<double> fwt;            // mean over j > 1 of R[j-1][j] - R[0][j]
  std::optional<double> fwt_random;     // the same against an untrained model
  std::optional<double> forgetting;     // mean over j < T of max R[i][j], 1 <= i < T, minus R[T][j]
  double learning_accuracy = 0;         // mean of R[j][j]
  std::vector<double> gain_per_stage;   // R[j][j] - R[j-1][j]
  std::optional<double> intransigence;  // mean of R_joint[j] - R[j][j]
  std::optional<double> cross_domain = {};  // mean over j > i >= 1 of R[i][j] - R[0][j]
};

// What else R is compared with.
struct ComparedWith {
  std::optional<std::vector<double>> random = {};  // an untrained model's rewards
  std::optional<std::vector<double>> joint = {};   // those of a run on all domains at once
};

// Throws ConfigError unless R has T + 1 rows of T columns, T >= 1, and what it is compared with T.
ContinualScores continual_scores(std::span<const std::vector<double>> r,
                                 const ComparedWith& other = {});

// How many of a task's trials succeeded.
struct Trials {
  int64_t succeeded = 0;
  int64_t of = 0;
};

// The chance that k of the n trials, drawn without replacement, all succeeded. Throws ConfigError
// unless 0 <= c <= n and 1 <= k <= n, where c succeeded.
double pass_hat_k(Trials trials, int64_t k);

// The chance that at least one of them did. Throws as pass_hat_k().
double pass_at_k(Trials trials, int64_t k);

// The area under a learning curve by the trapezoid rule, divided by its length: in [0, 1] for
// rewards. One point: the point. Throws ConfigError for none.
double area_under(std::span<const double> curve);

// The mean of a curve's first 11 points, or of as many as there are (A-GEM's LCA with beta = 10).
double early_area(std::span<const double> curve);

// Wilson's interval of a share.
Interval wilson(Trials trials);

// The 2.5th and 97.5th percentile of `statistic` over 2,000 resamples of `tasks` tasks, which are
// given by their indices: drawn from counters, the same for one seed, so that several statistics
// see the same resamples. Throws ConfigError for no tasks.
Interval bootstrap(int64_t tasks, uint64_t seed,
                   const std::function<double(std::span<const int64_t>)>& statistic);

// One trial of one test task.
struct EvaluatedTrial {
  double reward = 0;
  std::vector<std::string> called = {};  // names of the tools that were called
  int64_t calls = 0;                     // also malformed ones
  int64_t good_calls = 0;                // of these, which were read and returned no error
  std::vector<std::string> failed = {};  // names of the tools whose calls returned one
  // Whether the customer was told what he had to be told; nothing where he had to be told nothing.
  std::optional<bool> told = {};
};

// One test task.
struct EvaluatedTask {
  std::string id;
  std::vector<std::string> gold = {};  // names of the tools that solve it
  bool has_argument = false;           // a call of the solution has more than one
  std::vector<EvaluatedTrial> trials = {};
};

// One domain's turn.
struct StageRecord {
  std::string stage_id;
  std::string domain;
  // Mean reward on the stage's own tasks, of each iteration that had one.
  std::vector<double> curve = {};
  int64_t episodes = 0;                                 // of learning
  std::set<std::set<std::string>> training_tools = {};  // sets of gold tools among training tasks
};

// What a run measured.
struct RunRecord {
  std::vector<StageRecord> stages;
  // The columns of a joint run, whose one stage teaches all domains. Empty: those of the stages.
  std::vector<std::string> joint_domains = {};
  // [rows: after 0 to T stages][columns: domains, in the order of the stages][tasks]: the same
  // tasks and as many trials of each in every row. A trial that crashed is there, with reward 0.
  std::vector<std::vector<std::vector<EvaluatedTask>>> cells;
  ComparedWith other = {};
  // By agent ("null", "warm_up", "oracle") and domain.
  std::map<std::string, std::map<std::string, double>> baselines = {};
  int64_t retention_tasks = 10;  // the first N of a domain count for the guides' retention
  uint64_t seed = 0;             // of the resampling
};

// The mean rewards of the cells.
std::vector<std::vector<double>> reward_matrix(const RunRecord& run);

// How one tool fared in an evaluation.
struct ToolScores {
  // F1 of its calls against the solution's, mean of the trials with one of either.
  double selection = 0;
  std::optional<double> invocation = {};  // its calls that returned no error; of none nothing
  // In trials on tasks whose solution calls it: how often the customer was told what he had to be
  // told, of those in which he had to be told something, and the mean reward of all.
  std::optional<double> output_usage = {};
  double success = 0;
};

// What the evaluation after a stage says of it.
struct StageScores {
  std::map<int64_t, double> pass_hat_k = {};  // on its own domain, k = 1 to the number of trials
  // Mean reward on its tasks with a tool that is new; nothing where there are none.
  std::optional<double> new_tool_success = {};
  std::optional<double> retention = {};          // on the first tasks of each earlier domain
  std::map<std::string, ToolScores> tools = {};  // of those that solve its own domain's tasks
};

// The scores of stage `stage`, counted from 0. Throws ConfigError as metrics_json(), and for a
// stage that the run does not have.
StageScores stage_scores(const RunRecord& run, size_t stage);

// metrics.json: the scores with their intervals, the guides' older figures under "guides", and the
// baselines. What is not defined is null or absent. Throws ConfigError for cells that do not fit.
std::string metrics_json(const RunRecord& run);

}  // namespace lockstep::rl
