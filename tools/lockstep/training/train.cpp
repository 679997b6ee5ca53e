#include "training/train.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "beside.h"
#include "launch/job/run.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"
#include "lockstep/core/place.h"

namespace lockstep::tool {
namespace {

constexpr const char* kTrainFooter =
    R"(FILE describes the run: `lockstep config init` writes one to start from, docs/configuration.md has all keys. It is
checked before any rank is started. The other flags are those of `lockstep run`; they override the file's section
`launch`. Inside a launcher (lockstep run, torchrun, srun, mpirun) no ranks are started: this process becomes one.
A file with a section `three_domain`, or with `program: three_domain`, has that program's flags for keys,
docs/three_domain.md.

Exit status: as that of lockstep run; 2 for a wrong file.

  lockstep train run.yaml --nproc-per-node 4
  lockstep train run.yaml --set training.epochs=3 --set optimizer.learning_rate=0.01
)";

// "key: value"
std::string pair_text(const YAML::Node& key, const YAML::Node& value) {
  YAML::Emitter map;
  map << YAML::Flow << YAML::BeginMap << YAML::Key << key << YAML::Value << value << YAML::EndMap;
  const std::string text = map.c_str();
  return text.substr(1, text.size() - 2);
}

// A section and no others, without aliases, which may be of anchors in those. Its keys keep their
// places, so that errors name them.
std::string section_text(const YAML::Node& root, const std::string& section) {
  std::string out, line;
  int number = 0;
  const auto go_to = [&](const YAML::Mark& place) {
    for (; number < place.line; ++number) out += std::exchange(line, "") + "\n";
    line.resize(std::max(line.size(), static_cast<size_t>(place.column)), ' ');
  };
  for (const auto& item : root) {
    if (item.first.as<std::string>() != section) continue;
    go_to(item.first.Mark());
    if (!item.second.IsMap()) return out + line + pair_text(item.first, item.second);
    line += section + ": {";
    for (const auto& one : item.second) {
      go_to(one.first.Mark());
      line += pair_text(one.first, one.second) + ", ";
    }
    line += "}";
  }
  return out + line;
}

}  // namespace

void compare_threads(const train::RunConfig& config) {
  const int64_t given = config.launch.threads_per_rank;
  const auto own = env_text("OMP_NUM_THREADS");
  if (given == 0 || !own || *own == std::to_string(given)) return;
  const std::string& origin = config.origins.at("launch.threads_per_rank");
  if (origin.starts_with("--set ")) {
    throw ConfigError(fmt::format(
        "[train] {}: contradicts the environment OMP_NUM_THREADS={}: unset the variable", origin,
        *own));
  }
  fmt::print(stderr,
             "lockstep: {}: launch.threads_per_rank {} is not used: the environment has "
             "OMP_NUM_THREADS={}\n",
             origin, given, *own);
}

TrainCommand::TrainCommand(CLI::App& program)
    : run_(program, {.name = "train",
                     .description = "Train as a file says, on ranks that it starts itself",
                     .usage = "lockstep train FILE [FLAGS]",
                     .footer = kTrainFooter}) {
  run_.app()
      .add_option("--set", overrides_,
                  "Replaces a value of the file, as training.seed=3; any number of times")
      ->type_name("KEY=VALUE")
      ->expected(1)
      ->take_all();
}

std::vector<std::string> TrainCommand::take_file(const std::vector<std::string>& words) {
  std::vector<std::string> flags;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word.size() < 2 || word[0] != '-') {
      if (!file_.empty()) {
        throw ConfigError(fmt::format(
            "[train] two files, {} and {}: a run has one (values follow --set)", file_, word));
      }
      file_ = word;
      continue;
    }
    const bool is_last = i + 1 == words.size();
    bool value_follows = false;
    run_.take_flag(word, is_last ? "" : words[i + 1], value_follows);
    flags.push_back(word);
    if (value_follows && !is_last) flags.push_back(words[++i]);
  }
  return flags;
}

void TrainCommand::apply_launch_section(const train::RunConfig& config) {
  const auto& launch = config.launch;
  // The configuration has what the variables say, too, and --set goes before them.
  const auto give = [&](const char* key, const char* flag, const std::string& value) {
    if (!config.origins.contains(std::string("launch.") + key)) return;
    if (!value.empty() || !run_.value_of(flag).empty()) run_.replace(flag, value);
  };
  const auto number = [](int64_t value, int64_t none) {
    return value == none ? std::string() : std::to_string(value);
  };
  give("nproc_per_node", "--nproc-per-node", launch.nproc_per_node);
  give("nnodes", "--nnodes", launch.nnodes);
  give("node_rank", "--node-rank", number(launch.node_rank, -1));
  give("master_addr", "--master-addr", launch.master_addr);
  give("master_port", "--master-port", std::to_string(launch.master_port));
  give("rdzv_endpoint", "--rdzv-endpoint", launch.rdzv_endpoint);
  give("rdzv_backend", "--rdzv-backend", launch.rdzv_backend);
  give("rdzv_id", "--rdzv-id", launch.rdzv_id);
  give("max_restarts", "--max-restarts", std::to_string(launch.max_restarts));
  give("log_dir", "--log-dir", launch.log_dir);
  if (config.parallel.tls) run_.give("--tls", "true");
  if (!run_.is_said("--numa-binding")) give("bind", "--bind", launch.bind);
  if (launch.threads_per_rank > 0) {
    compare_threads(config);
    run_.add_variable("OMP_NUM_THREADS", std::to_string(launch.threads_per_rank));
  }
}

// What is given there counts for the ranks, too, whose run says how it was started. And the word of
// accelerate's --mixed-precision, whose variable means nothing where it is no.
std::vector<train::LaunchFlag> TrainCommand::launch_flags() const {
  std::vector<train::LaunchFlag> flags;
  const bool says_numa = run_.is_said("--numa-binding") && !run_.is_said("--bind");
  for (const std::string name :
       {"nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port", "rdzv-endpoint",
        "rdzv-backend", "rdzv-id", "max-restarts", "log-dir", "bind", "mixed-precision"}) {
    const std::string value = run_.value_of("--" + name);
    if (value.empty() || (name == "bind" && says_numa)) continue;
    std::string key = name == "mixed-precision" ? "mixed_precision.dtype" : "launch." + name;
    std::replace(key.begin(), key.end(), '-', '_');
    flags.push_back({.key = key, .value = value, .origin = run_.origin_of("--" + name)});
  }
  const std::string numa = run_.value_of("--numa-binding");
  if ((says_numa || run_.value_of("--bind").empty()) && (numa == "node" || numa == "exclusive")) {
    flags.push_back({.key = "launch.bind",
                     .value = numa == "node" ? "numa" : "cores",
                     .origin = run_.origin_of("--numa-binding")});
  }
  return flags;
}

std::vector<std::string> TrainCommand::own_program() {
  YAML::Node root;
  try {
    root = YAML::Load(source_.text);
  } catch (const YAML::Exception&) {
    return {};  // load_config() says what is wrong
  }
  if (!root.IsMap() || (!root["program"] && !root["three_domain"])) return {};
  const auto program = root["program"].as<std::string>("three_domain");
  if (program != "three_domain") {
    throw ConfigError(fmt::format("[train] {}:{}: program {}; there is three_domain", file_,
                                  root["program"].Mark().line + 1, program));
  }
  if (launcher_of_rank().empty()) apply_own_launch(root);
  std::vector<std::string> command = {program_beside("three_domain", "train"), "--config", file_};
  const YAML::Node section = root["three_domain"];
  const auto of_section = section.IsMap() ? section["num_gpus"].as<std::string>("2") : "2";
  std::string ranks = root["num_gpus"].as<std::string>(of_section);
  bool is_set = false;
  for (const std::string& one : overrides_) {
    const size_t end = std::min(one.find('='), one.size());
    std::string key = one.substr(0, end);
    std::replace(key.begin(), key.end(), '-', '_');
    if (key.starts_with("launch.")) continue;
    if ((key == "num_gpus" || key == "three_domain.num_gpus") && end < one.size()) {
      ranks = one.substr(end + 1);
      is_set = true;
      continue;
    }
    std::replace(key.begin(), key.end(), '_', '-');
    command.push_back("--" + key + one.substr(end));
  }
  if (is_set) {
    run_.replace("--nproc-per-node", ranks);
  } else {
    run_.give("--nproc-per-node", ranks);
  }
  return command;
}

void TrainCommand::apply_own_launch(const YAML::Node& root) {
  std::vector<std::string> overrides;
  for (const std::string& one : overrides_) {
    if (one.starts_with("launch.")) overrides.push_back(one);
  }
  if (!root["launch"] && overrides.empty()) return;
  const std::string text = root["launch"] ? section_text(root, "launch") : "{}";
  apply_launch_section(
      train::load_config({.name = file_, .text = text, .flags = launch_flags()}, overrides));
}

std::vector<std::string> TrainCommand::trainer() {
  if (auto own = own_program(); !own.empty()) return own;
  std::vector<std::string> command = {program_beside("lockstep-trainer", "train"), file_};
  for (const std::string& one : overrides_) {
    command.emplace_back("--set");
    command.push_back(one);
  }
  return command;
}

void TrainCommand::become_rank() {
  const std::vector<std::string> command = trainer();
  setenv(train::kSourceVariable, train::keep_source(source_).c_str(), 1);
  std::vector<char*> words;
  words.reserve(command.size() + 1);
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  execv(words.front(), words.data());
  throw launch::StartError(fmt::format("[train] {}: {}", command.front(), std::strerror(errno)),
                           126);
}

int TrainCommand::carry_out() {
  if (file_.empty()) throw ConfigError("[train] no file given (lockstep train --help)");
  source_ = train::read_source(file_);
  const std::string started_by = launcher_of_rank();
  if (!started_by.empty()) {
    auto flags = run_.given_flags();
    std::erase(flags, "--set");
    if (!flags.empty()) {
      throw ConfigError(
          fmt::format("[train] {}, so this process is a rank and starts none: leave out {}",
                      started_by, fmt::join(flags, ", ")));
    }
    become_rank();  // each rank checks the file; the launcher shows one's errors
  }
  run_.apply_accelerate();  // the file is checked with the environment that the ranks will have
  if (auto own = own_program(); !own.empty()) {
    run_.start_program(std::move(own));
  } else {
    source_.flags = launch_flags();
    apply_launch_section(train::load_config(source_, overrides_));
    run_.start_program(trainer());
  }
  if (run_.starts_ranks()) {
    run_.add_variable(train::kSourceVariable, train::keep_source(source_));
  }
  return run_.carry_out();
}

}  // namespace lockstep::tool
