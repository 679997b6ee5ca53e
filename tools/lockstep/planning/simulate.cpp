#include "lockstep/plan/simulate.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/counted.h"
#include "core/files/whole_file.h"
#include "core/nearest.h"
#include "flags.h"
#include "lockstep/core/error.h"
#include "lockstep/plan/goodput.h"
#include "plan/words.h"
#include "planning/plan.h"

namespace lockstep::tool {
namespace {

using plan::seconds_text;

constexpr int kMostSteps = 1'000'000;

using OrderedJson = nlohmann::ordered_json;

constexpr const char* kSimulateFooter =
    R"(Plays steps of a run through, event by event, for 1 to 1,048,576 ranks: computation of each rank at its own speed, collectives,
stragglers; then the whole run with failures, checkpoints and restarts. Which run: as for lockstep plan. docs/plan.md.

  lockstep simulate --model qwen3-8b --bf16 --device h100-sxm --ranks 1024 --trace steps.json
  lockstep simulate run.yaml --ranks 64 --slow-ranks 1 --slow-factor 1.3
  lockstep simulate run.yaml --failure-hours 20000 --save-seconds 60
  lockstep simulate run.yaml --ranks 1024 --failure-hours 10000,50000,200000

--trace writes a timeline that https://ui.perfetto.dev and chrome://tracing show.
)";

plan::Strategy strategy_named(const std::string& name) {
  const std::map<std::string, plan::Strategy> all = {
      {"ddp", plan::Strategy::Ddp},
      {"zero", plan::Strategy::Zero},
      {"fsdp-gradients", plan::Strategy::FsdpGradients},
      {"fsdp", plan::Strategy::FsdpFull},
      {"fsdp-hybrid-gradients", plan::Strategy::FsdpHybridGradients},
      {"fsdp-hybrid", plan::Strategy::FsdpHybrid}};
  if (const auto found = all.find(name); found != all.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [known, strategy] : all) names.push_back(known);
  throw ConfigError(
      fmt::format("[simulate] --strategy {}: ddp, zero, fsdp-gradients, fsdp, "
                  "fsdp-hybrid-gradients or fsdp-hybrid{}",
                  name, hint_of(name, names)));
}

// The whole run for several intervals between checkpoints, and the best.
struct RunTable {
  plan::Reliability reliability;
  double best, young, daly, chosen;
  plan::SimulatedRun run;
};

// With a checkpoint every `interval` seconds of work; 0: the best interval.
RunTable run_table(const plan::Reliability& reliability, double interval, double work,
                   uint64_t seed) {
  const double best = plan::best_interval(reliability), chosen = interval > 0 ? interval : best;
  return {.reliability = reliability,
          .best = best,
          .young = plan::young_interval(reliability),
          .daly = plan::daly_interval(reliability),
          .chosen = chosen,
          .run = plan::simulate_run(reliability, chosen, work, seed)};
}

OrderedJson json_of(const RunTable& table) {
  return {{"failure_interval", table.reliability.failure_interval()},
          {"best_interval", table.best},
          {"young_interval", table.young},
          {"daly_interval", table.daly},
          {"interval", table.chosen},
          {"expected_goodput", plan::goodput(table.reliability, table.chosen)},
          {"simulated",
           {{"seconds", table.run.seconds},
            {"failures", table.run.failures},
            {"saving", table.run.saving},
            {"lost", table.run.lost},
            {"restarting", table.run.restarting},
            {"done", table.run.done},
            {"goodput", table.run.goodput}}}};
}

OrderedJson json_of(const plan::Simulation& steps, plan::Strategy strategy, int64_t ranks,
                    const std::vector<RunTable>& tables) {
  OrderedJson all = {{"strategy", plan::name_of(strategy)},
                     {"ranks", ranks},
                     {"steps", steps.steps},
                     {"computation", steps.computation},
                     {"communication", steps.communication},
                     {"waiting", steps.waiting},
                     {"slowest_rank", steps.slowest_rank}};
  if (tables.size() == 1) {
    all["run"] = json_of(tables[0]);
  } else {
    for (const RunTable& table : tables) all["runs"].push_back(json_of(table));
  }
  return all;
}

// A line for each failure rate.
std::string table_of(const std::vector<RunTable>& tables) {
  std::vector<std::vector<std::string>> rows = {
      {"a rank fails every", "some rank", "save every", "goodput", "simulated", "failures"}};
  for (const RunTable& table : tables) {
    rows.push_back(
        {seconds_text(table.reliability.rank_failure_interval),
         seconds_text(table.reliability.failure_interval()), seconds_text(table.chosen),
         fmt::format("{:.2f} %", 100 * plan::goodput(table.reliability, table.chosen)),
         table.run.goodput > 0 ? fmt::format("{:.2f} %", 100 * table.run.goodput) : "not done",
         std::to_string(table.run.failures)});
  }
  return plan::table_text(rows, 0);
}

// Of one failure rate. `work` and a `step` are in seconds.
void print_run(const RunTable& table, double work, double step) {
  fmt::print("\n{:>16}  {:>10}\n", "save every", "goodput");
  for (const double factor : {0.1, 0.3, 1.0, 3.0, 10.0}) {
    fmt::print("{:>16}  {:>10}{}\n", seconds_text(factor * table.best),
               fmt::format("{:.2f} %", 100 * plan::goodput(table.reliability, factor * table.best)),
               factor == 1 ? fmt::format("   the best; Young: {}, Daly: {}",
                                         seconds_text(table.young), seconds_text(table.daly))
                           : "");
  }
  const auto& run = table.run;
  const double between = std::max(1.0, std::round(table.chosen / step));
  fmt::print("\nSome rank fails every {}. {} of work with a checkpoint every {} ({:.0f} step{}): ",
             seconds_text(table.reliability.failure_interval()), seconds_text(work),
             seconds_text(table.chosen), between, between == 1 ? "" : "s");
  const std::string spent = fmt::format("{} lost, {} saving, {} restarting", seconds_text(run.lost),
                                        seconds_text(run.saving), seconds_text(run.restarting));
  if (run.done < work) {
    fmt::print(
        "not done after {}, at which the simulation ends: {} of {} in {} ({}). Save and "
        "restart faster, or use fewer ranks\n",
        counted(run.failures, "failure"), seconds_text(run.done), seconds_text(work),
        seconds_text(run.seconds), spent);
    return;
  }
  fmt::print("{}, {} in all, goodput {:.2f} % ({})\n", counted(run.failures, "failure"),
             seconds_text(run.seconds), 100 * run.goodput, spent);
}

}  // namespace

SimulateCommand::SimulateCommand(CLI::App& program) {
  auto& command = *program.add_subcommand(
      "simulate", "Play steps and failures of a run through, for any number of ranks");
  command.footer(kSimulateFooter);
  command.get_formatter()->column_width(34);
  question_.add_flags(command);
  command
      .add_option("--strategy", strategy_,
                  "ddp, zero, fsdp-gradients, fsdp, fsdp-hybrid-gradients, fsdp-hybrid (the best "
                  "that fits)")
      ->type_name("NAME");
  command.add_option("--steps", steps_, "Steps that are played through (3)")
      ->type_name("N")
      ->check(whole_number(1, kMostSteps));
  command.add_option("--jitter", jitter_, "Deviation of each rank's speed, as a share (0.02)")
      ->type_name("SHARE");
  command.add_option("--slow-ranks", slow_ranks_, "How many are slower all the time (0)")
      ->type_name("N");
  command.add_option("--slow-factor", slow_factor_, "By this factor (1.5)")->type_name("FACTOR");
  command.add_flag("--no-prefetch", no_prefetch_, "Fsdp gathers a unit when it is needed");
  command.add_option("--seed", seed_, "Of all draws (1)")->type_name("N");
  auto* const trace = command.add_option("--trace", trace_, "Write a timeline")->type_name("FILE");
  command.add_option("--traced-ranks", traced_ranks_, "Ranks in the timeline (4)")
      ->type_name("N")
      ->needs(trace);
  command
      .add_option("--failure-hours", failure_hours_,
                  "Mean time between failures of one rank (50000); several: 1000,20000")
      ->type_name("HOURS")
      ->delimiter(',')
      ->allow_extra_args(false);
  command.add_option("--save-seconds", save_, "Training stands still at a checkpoint (30)")
      ->type_name("SECONDS");
  command.add_option("--restart-seconds", restart_, "From a failure until training resumes (120)")
      ->type_name("SECONDS");
  command.add_option("--save-every", interval_, "Seconds of work between checkpoints (the best)")
      ->type_name("SECONDS")
      ->check(some_seconds(1e9));
  command.add_option("--work-hours", work_hours_, "Computation of the whole run (720)")
      ->type_name("HOURS");
  command.add_flag("--json", json_, "Print one JSON object");
}

void SimulateCommand::check_times() const {
  const auto refuse = [](const char* flag, double number, const char* instead) {
    throw ConfigError(fmt::format("[simulate] {}: {} is not a time: give a finite number {}", flag,
                                  number, instead));
  };
  for (const auto& [flag, number] :
       {std::pair{"--save-seconds", save_}, std::pair{"--work-hours", work_hours_}}) {
    if (!std::isfinite(number) || number <= 0) refuse(flag, number, "above 0");
  }
  for (const double hours : failure_hours_) {
    if (!std::isfinite(hours) || hours <= 0) refuse("--failure-hours", hours, "above 0");
  }
  if (!std::isfinite(restart_) || restart_ < 0) {
    refuse("--restart-seconds", restart_, "of at least 0");
  }
}

int SimulateCommand::carry_out() const {
  auto config = question_.config();
  const auto machine = question_.machine(config);
  config.mixed_precision.dtype = plan::dtype_on(machine, config);
  const auto profile = question_.profile(config);
  const auto training = question_.training(config);
  const int64_t ranks = question_.ranks(config, machine);
  check_times();
  // Before any step is played: its errors are about the command line.
  std::vector<RunTable> tables;
  for (const double hours : failure_hours_) {
    const plan::Reliability reliability{
        .ranks = ranks, .rank_failure_interval = hours * 3600, .save = save_, .restart = restart_};
    tables.push_back(run_table(reliability, interval_, work_hours_ * 3600, seed_));
  }
  plan::Strategy strategy = plan::Strategy::Ddp;
  if (!strategy_.empty()) {
    strategy = strategy_named(strategy_);
  } else if (const auto plan = plan::make_plan(profile, training, machine, {.ranks = ranks});
             plan.best) {
    strategy = plan.best->strategy;
  } else {
    fmt::print(stderr, "lockstep: nothing fits on {} (lockstep plan says why); simulated as Ddp\n",
               counted(ranks, "rank"));
  }
  const auto out = plan::simulate(profile, training, strategy, machine, ranks,
                                  {.steps = steps_,
                                   .jitter = jitter_,
                                   .slow_ranks = slow_ranks_,
                                   .slow_factor = slow_factor_,
                                   .prefetch = !no_prefetch_,
                                   .traced_ranks = trace_.empty() ? 0 : traced_ranks_,
                                   .seed = seed_});
  if (!trace_.empty()) {
    if (const int error = write_whole_file(trace_, out.trace); error != 0) {
      throw Error(fmt::format("[simulate] cannot write {}: {}: name another file by --trace",
                              trace_, std::strerror(error)));
    }
  }
  if (json_) {
    fmt::print("{}\n", json_of(out, strategy, ranks, tables).dump(2));
    return 0;
  }
  const double mean = std::accumulate(out.steps.begin(), out.steps.end(), 0.0) /
                      static_cast<double>(out.steps.size());
  fmt::print("{} on {} of {}, {}: {} a step over {}\n", profile.name, counted(ranks, "rank"),
             machine.device.name, plan::name_of(strategy), seconds_text(mean),
             counted(steps_, "step"));
  fmt::print(
      "  the median rank computes {}, and waits {} ({}); collectives take {}; rank {} is the "
      "slowest\n",
      seconds_text(out.computation), seconds_text(out.waiting),
      plan::percent_text(out.waiting / mean), seconds_text(out.communication), out.slowest_rank);
  if (!trace_.empty()) fmt::print("  timeline: {} (open it in https://ui.perfetto.dev)\n", trace_);
  if (tables.size() > 1) {
    fmt::print("\n{}", table_of(tables));
  } else {
    print_run(tables[0], work_hours_ * 3600, mean);
  }
  return 0;
}

}  // namespace lockstep::tool
