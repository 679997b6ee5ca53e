#include "training/sweep.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "core/counted.h"
#include "core/files/whole_file.h"
#include "flags.h"
#include "launch/job/run.h"
#include "lockstep/core/error.h"
#include "lockstep/train/config_texts.h"
#include "training/train.h"

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr size_t kMostRuns = 10'000;
constexpr const char* kSweepFooter =
    R"(Each combination of the values after --over is a run of `lockstep train FILE`, as many at a time as the cores of this
host allow (--jobs). A run's files and its output, log.txt, are in OUT/run-000 and so on; OUT/sweep.json has all results.
With checkpoint.restore_best a run counts by its best evaluation, if that is by the same metric, otherwise by its last.
The file is checked with every combination before the first run starts.

Exit status: 0 when all runs have exited with status 0; 1 when any has not; 2 for a wrong file.

  lockstep sweep run.yaml --over optimizer.learning_rate=1e-3,1e-2 --over training.seed=1,2,3
  lockstep sweep run.yaml --over 'model.hidden=[64],[256, 128]' --metric accuracy
)";

// "1e-3,1e-2" as the texts of its values.
std::vector<std::string> values_of(const std::string& axis, const std::string& list) {
  std::vector<std::string> values;
  try {
    const YAML::Node items = YAML::Load("[" + list + "]");
    for (const auto& item : items) {
      YAML::Emitter text;
      text << YAML::Flow << item;
      values.emplace_back(text.c_str());
    }
  } catch (const YAML::Exception& error) {
    throw ConfigError(fmt::format("[sweep] --over {}: not YAML: {}", axis, error.msg));
  }
  if (values.empty()) {
    throw ConfigError(fmt::format("[sweep] --over {}: no values, as training.seed=1,2,3", axis));
  }
  return values;
}

// What a run has left; null when there is nothing, or nothing whole.
Json result_of(const SweepRun& run) {
  std::ifstream file(run.folder + "/result.json");
  Json result = Json::parse(file, nullptr, false);
  return result.is_object() ? result : Json();
}

// The metric of the model that a run leaves.
std::optional<double> number_of(const SweepRun& run, const Json& result,
                                const std::string& metric) {
  const auto at = [](const Json& object, const std::string& name) -> std::optional<double> {
    if (!object.is_object()) return std::nullopt;
    const auto found = object.find(name);
    if (found == object.end() || !found->is_number()) return std::nullopt;
    return found->get<double>();
  };
  if (!result.is_object()) return std::nullopt;
  if (run.restores_best && result.value("best_metric", Json()) == metric) {
    return at(result, "best_value");
  }
  const Json metrics = result.value("metrics", Json());
  // One that is there and no number was NaN or infinite; the last step's loss does not stand for
  // it.
  if (metrics.is_object() && metrics.contains(metric)) return at(metrics, metric);
  return at(result, metric == "loss" ? "train_loss" : metric);
}

// One that no run will have, before all of them are trained.
void refuse_metric(const std::string& metric, const train::RunConfig& config) {
  constexpr std::array kOfResult = {"train_loss", "samples_per_s", "step", "samples"};
  if (std::find(kOfResult.begin(), kOfResult.end(), metric) != kOfResult.end()) return;
  const bool evaluates = config.training.eval_strategy != "no";
  auto known = train::evaluated_numbers(config.training);
  if (evaluates && known.empty()) return;  // a metric of the program
  if (!evaluates) known = {"loss"};
  if (std::find(known.begin(), known.end(), metric) != known.end()) return;
  throw ConfigError(fmt::format(
      "[sweep] --metric {}: a run has {} and {}{}", metric, fmt::join(known, ", "),
      fmt::join(kOfResult, ", "),
      evaluates ? "; training.metrics says what is computed" : "; training.eval_strategy is no"));
}

void write_whole(const std::string& path, const std::string& text) {
  const int error = write_whole_file(path, text);
  if (error == 0) return;
  throw Error(fmt::format("[sweep] {} cannot be written: {}", path, std::strerror(error)));
}

// A key may have several names, and a group of keys is one, too: of two values of one key the last
// counts, so that a run would be called by one that it does not have. `backwards` are the same
// overrides in the opposite order; where other ones count, two are of one key.
void refuse_same_keys(const train::RunConfig& config, const train::RunConfig& backwards,
                      const std::vector<std::string>& chosen) {
  for (const auto& [key, origin] : config.origins) {
    const auto other = backwards.origins.find(key);
    if (other == backwards.origins.end() || other->second == origin) continue;
    std::vector<std::string> names;
    for (const std::string& one : chosen) {
      const std::string said = "--set " + one.substr(0, 200);
      if (said == origin || said == other->second) names.push_back(one.substr(0, one.find('=')));
    }
    if (key == "logging.output_dir") {
      throw ConfigError(
          fmt::format("[sweep] --over {}: each run has a folder of its own, below "
                      "--out",
                      fmt::join(names, ", ")));
    }
    throw ConfigError(fmt::format(
        "[sweep] --over {}: each says {}, and a run has one: give all its values in one",
        fmt::join(names, " and --over "), key));
  }
}

// The flag goes before them: all runs would have one number of ranks, under several names.
void refuse_chosen_ranks(const train::RunConfig& config, const std::vector<std::string>& chosen) {
  const auto found = config.origins.find("launch.nproc_per_node");
  if (found == config.origins.end()) return;
  for (const std::string& one : chosen) {
    if (found->second != "--set " + one.substr(0, 200)) continue;
    throw ConfigError(fmt::format(
        "[sweep] --over {}: --nproc-per-node gives all runs the same number of ranks: leave out "
        "one of them",
        one.substr(0, one.find('='))));
  }
}

}  // namespace

SweepCommand::SweepCommand(CLI::App& program)
    : command_(*program.add_subcommand(
          "sweep", "Train as a file says, once for each combination of some values")) {
  command_.footer(kSweepFooter);
  const auto list = [this](const char* name, std::vector<std::string>& into, const char* type,
                           const char* what) {
    return command_.add_option(name, into, what)->type_name(type)->expected(1)->take_all();
  };
  command_.add_option("FILE", file_, "The file of a run")->required();
  list("--over", axes_, "KEY=V,V,...", "The values of a key, any number of times")->required();
  list("--set", overrides_, "KEY=VALUE", "Replaces a value of the file in all runs");
  command_.add_option("--out", out_, "Where the runs' folders are (sweep)")->type_name("FOLDER");
  command_.add_option("--nproc-per-node", ranks_, "Ranks of each run (the file's, or 1)")
      ->type_name("N")
      ->check(whole_number(1, 4096));
  command_.add_option("--jobs", jobs_, "Runs at a time (cores / ranks of a run)")
      ->type_name("N")
      ->check(whole_number(1, 4096));
  command_.add_option("--metric", metric_, "By which the best run is chosen (loss)")
      ->type_name("NAME");
  command_.add_option("--mode", mode_, "min, max; auto: as early_stopping.mode")
      ->type_name("HOW")
      ->check(one_of({"auto", "min", "max"}));
}

std::vector<std::vector<std::string>> SweepCommand::combinations() const {
  std::vector<std::vector<std::string>> all = {{}};
  std::set<std::string> keys;
  for (const std::string& axis : axes_) {
    const size_t equals = axis.find('=');
    if (equals == axis.npos || equals == 0) {
      throw ConfigError(fmt::format("[sweep] --over {}: expected KEY=V,V,...", axis));
    }
    const std::string key = axis.substr(0, equals);
    if (!keys.insert(key).second) {
      throw ConfigError(
          fmt::format("[sweep] --over {} is there twice: give all its values in one", key));
    }
    const auto values = values_of(axis, axis.substr(equals + 1));
    if (std::set<std::string>(values.begin(), values.end()).size() < values.size()) {
      throw ConfigError(fmt::format(
          "[sweep] --over {}: a value is there twice, and would be trained twice", axis));
    }
    if (all.size() * values.size() > kMostRuns) {
      throw ConfigError(fmt::format("[sweep] more than {} runs", kMostRuns));
    }
    std::vector<std::vector<std::string>> longer;
    for (const auto& before : all) {
      for (const std::string& value : values) {
        longer.push_back(before);
        longer.back().push_back(axis.substr(0, equals + 1) + value);
      }
    }
    all = std::move(longer);
  }
  return all;
}

// Values that are written differently may be one, as 1e-3 and 0.001.
void SweepCommand::refuse_same_run(const train::RunConfig& config,
                                   const std::vector<std::string>& chosen) {
  auto texts = train::config_texts(config);
  texts.erase("logging.output_dir");
  const std::string said = fmt::format("{}", fmt::join(chosen, " "));
  const auto [earlier, is_new] = trained_.emplace(std::move(texts), said);
  if (is_new) return;
  throw ConfigError(
      fmt::format("[sweep] --over: {} is the same run as {}: a value is there twice, and would be "
                  "trained twice",
                  said, earlier->second));
}

// Where several runs would write to one place, and one of them might resume with another's
// checkpoints; or listen at one port, at the same time.
void SweepCommand::refuse_shared_places(const train::RunConfig& config) {
  const auto& logging = config.logging;
  const auto& address = logging.prometheus_address;
  const std::string port = address.substr(std::min(address.rfind(':'), address.size()));
  for (const auto& [key, place] :
       {std::pair<const char*, std::string>{"checkpoint.directory", config.checkpoint.directory},
        {"logging.metrics_file", logging.metrics_file},
        {"logging.open_metrics_file", logging.open_metrics_file},
        {"logging.prometheus_address", port == ":0" ? "" : address}}) {
    if (place.empty() || places_.insert(key + place).second) continue;
    throw ConfigError(fmt::format(
        "[sweep] {} is {} in several runs: leave it out, each run has a folder of its own", key,
        place));
  }
  const int64_t listens = config.launch.master_port;
  if (listens > 0 && !places_.insert(fmt::format("launch.master_port{}", listens)).second) {
    throw ConfigError(fmt::format(
        "[sweep] launch.master_port is {} in several runs, which may be on this host at the same "
        "time: leave it out, or give --set launch.master_port=0, and each run takes a free port",
        listens));
  }
  if (logging.result_file.empty()) return;
  throw ConfigError(fmt::format(
      "[sweep] logging.result_file is {}: leave it out, a run's result is in the run's folder",
      logging.result_file));
}

std::vector<SweepRun> SweepCommand::plan() {
  std::vector<SweepRun> runs;
  std::error_code error;
  const std::string self = fs::read_symlink("/proc/self/exe", error).string();
  source_ = train::read_source(file_);
  for (const auto& chosen : combinations()) {
    SweepRun run{.name = fmt::format("run-{:03}", runs.size()), .chosen = chosen};
    run.folder = (fs::path(out_) / run.name).string();
    auto overrides = overrides_;
    overrides.insert(overrides.end(), chosen.begin(), chosen.end());
    overrides.push_back("logging.output_dir=" + Json(run.folder).dump());
    const auto config = train::load_config(source_, overrides);
    auto backwards = overrides;
    std::reverse(backwards.begin() + static_cast<std::ptrdiff_t>(overrides_.size()),
                 backwards.end());
    refuse_same_keys(config, train::load_config(source_, backwards), chosen);
    refuse_same_run(config, chosen);
    const bool is_fixed = command_.get_option("--nproc-per-node")->count() > 0;
    if (is_fixed) refuse_chosen_ranks(config, chosen);
    if (!is_fixed) {
      ranks_ =
          std::max(runs.empty() ? 1 : ranks_, launch::count_ranks(config.launch.nproc_per_node));
    }
    refuse_shared_places(config);
    refuse_metric(metric_, config);
    run.restores_best = config.checkpoint.restore_best;
    run.has_threads = config.launch.threads_per_rank > 0;
    if (run.has_threads) compare_threads(config);
    if (config.launch.nnodes != "1") {
      throw ConfigError(
          fmt::format("[sweep] launch.nnodes is {}: the runs of a sweep are on this "
                      "host",
                      config.launch.nnodes));
    }
    run.command = {self, "train", file_};
    if (is_fixed) {
      run.command.insert(run.command.end(), {"--nproc-per-node", std::to_string(ranks_)});
    }
    for (const std::string& one : overrides) run.command.insert(run.command.end(), {"--set", one});
    runs.push_back(std::move(run));
  }
  return runs;
}

int SweepCommand::report(const std::vector<SweepRun>& runs) const {
  const bool is_lower = mode_ == "auto" ? train::is_better_lower(metric_) : mode_ == "min";
  Json list = Json::array();
  const SweepRun* best = nullptr;
  double best_value = 0;
  int failed = 0;
  std::set<std::string> metrics = {"loss"};
  for (const SweepRun& run : runs) {
    const Json result = result_of(run);
    const auto value = number_of(run, result, metric_);
    list.push_back({{"name", run.name},
                    {"folder", run.folder},
                    {"set", run.chosen},
                    {"exit_status", run.status < 0 ? Json() : Json(run.status)},
                    {"result", result}});
    failed += run.status != 0 ? 1 : 0;
    const Json own = result.is_object() ? result.value("metrics", Json::object()) : Json::object();
    for (const auto& item : own.items()) metrics.insert(item.key());
    if (run.status != 0 || !value || std::isnan(*value)) continue;
    if (best != nullptr && (is_lower ? *value >= best_value : *value <= best_value)) continue;
    best = &run;
    best_value = *value;
  }
  const Json all = {{"file", file_},
                    {"metric", metric_},
                    {"best", best == nullptr ? Json() : Json(best->name)},
                    {"runs", list}};
  const std::string path = out_ + "/sweep.json";
  write_whole(path, all.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
  if (best != nullptr) {
    fmt::print("best: {} ({} = {}) with {}\n", best->name, metric_, best_value,
               fmt::join(best->chosen, " "));
  }
  if (best == nullptr && failed == 0) {
    fmt::print(stderr, "lockstep: [sweep] no run has a number {}: --metric is one of {}\n", metric_,
               fmt::join(metrics, ", "));
  }
  fmt::print("{} of {} runs succeeded; {}\n", runs.size() - static_cast<size_t>(failed),
             runs.size(), path);
  return best != nullptr && failed == 0 ? 0 : 1;
}

int SweepCommand::carry_out() {
  std::vector<SweepRun> runs = plan();
  const int cores = launch::count_ranks("cpu");
  const int jobs = jobs_ > 0 ? jobs_ : std::max(1, cores / ranks_);
  for (const SweepRun& run : runs) {
    std::error_code error;
    const bool is_new = fs::create_directories(run.folder, error);
    if (error) {
      throw Error(fmt::format("[sweep] {}: {}: name another folder with --out", run.folder,
                              error.message()));
    }
    // What an earlier sweep has left would count as this one's.
    if (!is_new) {
      throw ConfigError(
          fmt::format("[sweep] {} is there already: name another folder with --out, or "
                      "remove {}",
                      run.folder, out_));
    }
  }
  fmt::print("{}, {} at a time, in {}\n", counted(std::ssize(runs), "run"), jobs, out_);
  std::fflush(stdout);
  const int threads = std::max(1, cores / (jobs * ranks_));
  const int signal = tool::carry_out(
      runs, jobs,
      {{"OMP_NUM_THREADS", std::to_string(threads)},
       {train::kSourceVariable, train::keep_source(source_)}},
      [this](const SweepRun& run) {
        const auto value = number_of(run, result_of(run), metric_);
        const std::string outcome =
            run.status != 0
                ? fmt::format("failed with status {}: {}/log.txt", run.status, run.folder)
            : value ? fmt::format("{} = {}", metric_, *value)
                    : fmt::format("ended; no {}", metric_);
        fmt::print("{}: {}: {}\n", run.name, fmt::join(run.chosen, " "), outcome);
        std::fflush(stdout);
      });
  if (signal == 0) return report(runs);
  try {
    report(runs);
  } catch (const Error&) {
    // That no run has come to its end is no wonder.
  }
  fmt::print(stderr, "lockstep: [sweep] a signal has stopped it\n");
  return 128 + signal;
}

}  // namespace lockstep::tool
