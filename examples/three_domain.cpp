// An agent learns to serve the customers of an airline, then of a shop, then of a telephone
// company, by reinforcement learning, and the run reports what it has learnt and what it has
// forgotten:
//   three_domain --num-gpus 2
//   lockstep run --nproc-per-node 2 three_domain
//   lockstep train three_domain.yaml
// Without --model a tiny model learns in minutes. docs/three_domain.md has it all.
#include <lockstep/comm/world.h>
#include <lockstep/core/error.h>
#include <lockstep/core/place.h>
#include <lockstep/core/preemption.h>
#include <lockstep/plan/placement.h>
#include <lockstep/rl/run.h>
#include <lockstep/rl/tau2.h>
#include <lockstep/train/config_source.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "program.h"
#include "three_domain_flags.h"

namespace three_domain {
namespace {

// With a model the defaults are the guides'; flags that are given override both.
bool has_model(const std::vector<std::string>& arguments) {
  bool has = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_next = arguments[i] == "--model" && i + 1 < arguments.size();
    if (!is_next && !arguments[i].starts_with("--model=")) continue;
    if ((is_next ? arguments[i + 1] : arguments[i].substr(8)).empty()) {
      throw lockstep::ConfigError(
          "[three_domain] --model is empty: give a folder or a name, or leave it out for the tiny "
          "model");
    }
    has = true;
  }
  return has;
}

// All flags: those of the file, which those of the command line override; and where each is from.
struct Arguments {
  std::vector<std::string> words;
  std::vector<std::string> given;                       // those of the command line
  bool has_launch = false;                              // the file has a section launch
  std::string nproc_per_node, nnodes;                   // which may have these
  std::map<std::string, std::string> origins;           // by the name of RunOptions::as_text()
  std::optional<lockstep::train::ConfigSource> source;  // the file as it was read
};

void add_origins(Arguments& arguments, const std::vector<std::string>& words, const char* origin) {
  for (const auto& word : words) {
    if (!word.starts_with("--")) continue;
    std::string name = word.substr(2, word.find('=') - 2);
    if (name == "no-grpo") name = "use-grpo";
    if (name == "keep-equal-groups") name = "drop-equal-groups";
    if (name == "gradient-accumulation-steps") name = "prompts";
    if (name == "log-eval") name = "log-eval-all";
    arguments.origins[name] = origin;
  }
}

Arguments arguments_of(int argc, char** argv) {
  Arguments out;
  out.given.assign(argv + 1, argv + argc);
  auto& given = out.given;
  for (std::string& word : given) {
    const size_t end = std::min(word.find('='), word.size());
    if (!word.starts_with("--") || end <= 2) continue;
    const std::string flag = flag_of(word.substr(2, end - 2));
    word = flag + word.substr(end);
  }
  for (size_t i = 0; i < given.size(); ++i) {
    std::string file;
    if (given[i].starts_with("--config=")) file = given[i].substr(9);
    if (given[i] == "--config" && i + 1 < given.size()) file = given[i + 1];
    if (file.empty()) continue;
    out.source = lockstep::train::read_source(file);
    const FileFlags flags(*out.source);
    if (out.has_launch || (flags.has_launch() && !out.words.empty())) {
      throw lockstep::ConfigError("[three_domain] one --config with a section launch is all: " +
                                  out.source->name + " is another");
    }
    add_origins(out, flags.words(), "file");
    out.words.insert(out.words.end(), flags.words().begin(), flags.words().end());
    out.has_launch = flags.has_launch();
    out.nproc_per_node = flags.nproc_per_node();
    out.nnodes = flags.nnodes();
  }
  add_origins(out, given, "command line");
  out.words.insert(out.words.end(), given.begin(), given.end());
  return out;
}

// How many ranks it starts by itself, on this host.
int64_t ranks_here(const Flags& flags) {
  return flags.num_gpus > 0 ? flags.num_gpus : std::min<long>(2, sysconf(_SC_NPROCESSORS_ONLN));
}

// And on all hosts; 0 where these have to be asked.
int64_t ranks_of(const Flags& flags, const Arguments& arguments) {
  const auto number = [](const std::string& text, int64_t otherwise) {
    int64_t value = otherwise;
    const bool good = text.empty() || CLI::detail::lexical_cast(text, value);
    return good && value > 0 ? value : 0;
  };
  const int64_t here = ranks_here(flags);
  return (flags.num_gpus > 0 ? here : number(arguments.nproc_per_node, here)) *
         number(arguments.nnodes, 1);
}

rl::Course course_of(const Flags& flags) {
  return flags.run.env == "tau2" ? rl::tau2_course(flags.run, {.python = flags.tau2_python})
                                 : rl::embedded_course(flags.run);
}

// In one process, or on the first of the ranks that a launcher has started.
void describe(Flags& flags, const Arguments& arguments) {
  const auto place = is_launched() ? lockstep::rank_from_env() : lockstep::Place{};
  if (place.rank != 0) return;
  const int64_t ranks = is_launched() ? place.size : ranks_of(flags, arguments);
  if (ranks == 0) {
    throw lockstep::ConfigError(
        "[three_domain] --dry-run: launch.nproc_per_node and launch.nnodes have to be numbers, "
        "which tell how many ranks there are");
  }
  flags.run.parallel =
      flags.parallel == "auto" ? lockstep::plan::placement_here(flags.run, ranks) : flags.parallel;
  const std::string text = rl::describe_run(course_of(flags), flags.run, ranks) +
                           lockstep::plan::memory_text(flags.run, ranks);
  std::fputs(text.c_str(), stdout);
}

// Of a model that is given, before it is read.
void show_memory(const rl::RunOptions& run, const lockstep::World& world) {
  const bool is_counted = world.device().is_cpu() && world.local_size() == world.size();
  if (run.model.empty() || run.quiet || !world.is_main() || !is_counted) return;
  try {
    std::fputs(lockstep::plan::memory_text(run, world.size()).c_str(), stdout);
  } catch (const lockstep::Error&) {
    // Of the model's folder: run_continual() says it on all ranks.
  }
}

// KEY=VALUE for each flag of the command line that is about the run itself.
std::vector<std::string> settings_of(const std::vector<std::string>& given, const CLI::App& app) {
  std::vector<std::string> out;
  for (size_t i = 0; i < given.size(); ++i) {
    const size_t end = std::min(given[i].find('='), given[i].size());
    const std::string flag = given[i].substr(0, end);
    std::string value = "true";
    if (end < given[i].size()) {
      value = given[i].substr(end + 1);
    } else if (app.get_option(flag)->get_expected_max() > 0) {
      value = given.at(++i);
    }
    if (flag != "--config" && flag != "--num-gpus") out.push_back(key_of(flag) + "=" + value);
  }
  return out;
}

// `lockstep` stands beside this program or in the PATH. Ranks read what was in the file when this
// process did; `lockstep train` knows what the section launch says.
void start_ranks(const Flags& flags, const Arguments& arguments, const CLI::App& app, int argc,
                 char** argv) {
  if (arguments.source) {
    setenv(lockstep::train::kSourceVariable,
           lockstep::train::keep_source(*arguments.source).c_str(), 1);
  }
  const auto self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string beside = (self.parent_path() / "lockstep").string();
  const std::string launcher = std::filesystem::exists(beside) ? beside : "lockstep";
  std::vector<std::string> words{launcher, arguments.has_launch ? "train" : "run"};
  if (flags.num_gpus > 0 || arguments.nproc_per_node.empty())
    words.push_back("--nproc-per-node=" + std::to_string(ranks_here(flags)));
  words.push_back(arguments.has_launch ? arguments.source->name : self.string());
  if (arguments.has_launch) {
    for (const auto& setting : settings_of(arguments.given, app)) {
      words.emplace_back("--set");
      words.push_back(setting);
    }
  } else {
    words.insert(words.end(), argv + 1, argv + argc);
  }
  std::vector<char*> command;
  for (std::string& word : words) command.push_back(word.data());
  command.push_back(nullptr);
  execvp(command.front(), command.data());
  throw lockstep::Error(
      "[three_domain] the program lockstep, which starts ranks, is neither beside " +
      self.string() + " nor in the PATH");
}

}  // namespace
}  // namespace three_domain

int main(int argc, char** argv) {
  using namespace three_domain;
  std::signal(SIGXFSZ, SIG_IGN);                     // a write beyond RLIMIT_FSIZE is an error
  std::optional<lockstep::PreemptionNotice> notice;  // of a rank
  CLI::App app("Three domains, one after another, by reinforcement learning");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  Flags flags;
  Arguments arguments;
  try {
    arguments = arguments_of(argc, argv);
    flags.run = has_model(arguments.words) ? rl::model_preset() : rl::tiny_preset();
  } catch (const lockstep::ConfigError& error) {
    return example::fail(error.what(), 2);
  }
  flags.run.origins = arguments.origins;
  add_flags(app, flags);
  bool preempted = false;
  std::vector<char*> words{argv[0]};
  for (auto& argument : arguments.words) words.push_back(argument.data());
  const auto body = [&] {
    if (!flags.order.empty()) {
      flags.run.order.clear();
      std::stringstream names(flags.order);
      for (std::string name; std::getline(names, name, ',');) flags.run.order.push_back(name);
    }
    flags.run.loss_norm = rl::loss_norm(flags.norm);
    flags.run.scale_rewards = rl::scale_rewards(flags.scale);
    flags.run.parallel = flags.parallel != "auto"         ? flags.parallel
                         : flags.run.reference == "shard" ? "fsdp"
                                                          : "ddp";  // to be seen
    if (__builtin_mul_overflow(flags.run.prompts, flags.accumulation, &flags.run.prompts)) {
      throw lockstep::ConfigError("[three_domain] --gradient-accumulation-steps " +
                                  std::to_string(flags.accumulation) +
                                  " is out of range for these --prompts");
    }
    if (flags.log_eval == "all") flags.run.log_all = true;
    rl::shorten_trial(flags.run);
    rl::allow_turns(flags.run);
    flags.run.check();
    if (flags.dry_run) return describe(flags, arguments);
    if (!is_launched()) {
      const int64_t ranks = ranks_of(flags, arguments);
      if (flags.run.lanes > 0 && ranks > flags.run.lanes) {
        throw lockstep::ConfigError("[three_domain] --lanes " + std::to_string(flags.run.lanes) +
                                    " for " + std::to_string(ranks) +
                                    " ranks: each rank needs one");
      }
      if (ranks > 1 || arguments.has_launch) start_ranks(flags, arguments, app, argc, argv);
    }
    notice.emplace();
    const auto world = lockstep::World::from_env();
    if (flags.num_gpus > 0 && flags.num_gpus != world.size()) {
      throw lockstep::ConfigError("[three_domain] --num-gpus " + std::to_string(flags.num_gpus) +
                                  ", but the launcher has started " + std::to_string(world.size()) +
                                  " ranks: leave one of them out");
    }
    flags.run.parallel =
        flags.parallel == "auto" ? lockstep::plan::placement(flags.run, world) : flags.parallel;
    show_memory(flags.run, world);
    if (!flags.force) lockstep::plan::check_memory(flags.run, world);
    const auto course = course_of(flags);
    preempted = rl::run_continual(world, course, flags.run, &*notice).preempted;
  };
  const int status = example::run(app, static_cast<int>(words.size()), words.data(), body,
                                  example::Result::InFiles);
  return status == 0 && preempted ? lockstep::kRequeueStatus : status;
}
