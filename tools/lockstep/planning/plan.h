// `lockstep plan` and `lockstep simulate`: what a run will need and take.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/plan/plan.h"

namespace lockstep::tool {

constexpr int kMostOfAFlag = 1'000'000'000;

// What both commands ask: which model, on what.
class PlanQuestion {
 public:
  void add_flags(CLI::App& command);
  // Of the command line. Throws ConfigError for what is missing or contradicts itself.
  train::RunConfig config() const;
  // Its nodes have as many devices as a run of `config` starts ranks on a host, where the command
  // line gives no other number. Prints a warning where it was measured with another number of
  // ranks.
  plan::Machine machine(const train::RunConfig& config) const;
  plan::ModelProfile profile(const train::RunConfig& config) const;
  plan::Training training(const train::RunConfig& given) const;
  int64_t ranks(const train::RunConfig& config, const plan::Machine& machine) const;
  bool has_file() const { return !file_.empty(); }

 private:
  std::string file_, model_, device_, network_, machine_, sample_;
  std::vector<std::string> overrides_;
  int64_t ranks_ = 0, per_node_ = 0, outputs_ = 0, tokens_ = 0, batch_ = 0;
  double measured_step_ = 0;
  bool recompute_ = false, narrow_ = false;
};

class PlanCommand {
 public:
  // Adds the command, and reads into this.
  explicit PlanCommand(CLI::App& program);
  PlanCommand(const PlanCommand&) = delete;

  // The exit status: 0; 3 when nothing fits.
  int carry_out() const;

 private:
  int plan_grpo() const;
  // Throws ConfigError for flags that say nothing of GRPO.
  void check_grpo() const;

  const CLI::App* command_;
  PlanQuestion question_;
  bool json_ = false, grpo_ = false, lists_ = false;
  std::string reference_ = "resident";
  int64_t prompts_ = 1, group_size_ = 4, prompt_tokens_ = 7067, new_tokens_ = 1024,
          update_batch_ = 1;
};

class SimulateCommand {
 public:
  explicit SimulateCommand(CLI::App& program);
  SimulateCommand(const SimulateCommand&) = delete;

  int carry_out() const;

 private:
  // Throws ConfigError for a flag that is not a time.
  void check_times() const;

  PlanQuestion question_;
  std::string strategy_, trace_;
  int64_t steps_ = 3, slow_ranks_ = 0, traced_ranks_ = 4;
  uint64_t seed_ = 1;
  double jitter_ = 0.02, slow_factor_ = 1.5, save_ = 30, restart_ = 120;
  std::vector<double> failure_hours_ = {50000};
  double work_hours_ = 720, interval_ = 0;
  bool json_ = false, no_prefetch_ = false;
};

}  // namespace lockstep::tool
