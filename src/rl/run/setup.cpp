#include "rl/run/setup.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "comm/text.h"
#include "core/files/job_file.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"
#include "lockstep/rl/episode.h"
#include "rl/policy/encode.h"
#include "train/run/report.h"

namespace lockstep::rl {
namespace {

namespace fs = std::filesystem;

constexpr const char* kOptionsFile = "run.txt";

std::string lines_of(const std::map<std::string, std::string>& options) {
  std::string text;
  for (const auto& [name, value] : options) text += fmt::format("--{} {}\n", name, value);
  return text;
}

// What lines_of() has written of the run in output_dir; nothing where there is none.
std::map<std::string, std::string> options_in(const std::string& output_dir) {
  std::map<std::string, std::string> out;
  std::ifstream file(output_dir + "/" + kOptionsFile);
  for (std::string line; std::getline(file, line);) {
    const size_t end = std::min(line.find(' '), line.size());
    if (!line.starts_with("--") || end == line.size()) continue;
    const std::string name = line.substr(2, end - 2);
    // Files of before 0.1.0 have it without the "eval".
    out[name == "log-all" ? "log-eval-all" : name] = line.substr(end + 1);
  }
  // And have none of these.
  if (!out.empty()) {
    out.emplace("mixed", "refuse");
    out.emplace("parallel-calls", "false");
  }
  return out;
}

// What the run in output_dir began with; 0 where there is none.
int64_t lanes_in(const std::string& output_dir) {
  int64_t lanes = 0;
  std::istringstream(options_in(output_dir)["lanes"]) >> lanes;
  return lanes;
}

// What is wrong with resuming the run in output_dir; nothing when all is well.
std::string difference(const RunOptions& options) {
  if (!options.resume) {
    return fmt::format("[three_domain] --output-dir {} has a run already; --resume continues it",
                       options.output_dir);
  }
  auto before = options_in(options.output_dir);
  std::string differing;
  for (const auto& [name, value] : options.as_text()) {
    const auto found = before.find(name);
    const bool is_same = found != before.end() && found->second == value;
    if (found != before.end()) before.erase(found);
    // A checkpoint is resumed whole or sharded, and is compared with what there is at the end.
    if (is_same || name == "parallel" || name == "reference" || name == "joint-run") continue;
    differing += fmt::format(" --{} {}", name, value);
  }
  for (const auto& [name, value] : before) {
    if (!value.empty()) differing += fmt::format(" no --{} {}", name, value);
  }
  if (differing.empty()) return "";
  std::string problem = fmt::format("[three_domain] --output-dir {} has another run; here:{}",
                                    options.output_dir, differing);
  const int64_t lanes = lanes_in(options.output_dir);
  if (lanes > 0 && lanes != options.lanes) {
    problem += fmt::format("; it began with --lanes {}: resume it with these, on at most {} rank{}",
                           lanes, lanes, lanes == 1 ? "" : "s");
  }
  return problem;
}

// Throws ConfigError for what is too long for the context.
void refuse_too_long(const Course& course, const Curriculum& curriculum,
                     const text::Tokenizer& tokenizer, const RunOptions& options) {
  for (const auto& column : curriculum.columns) {
    const Arena& arena = course.arenas.at(column.domain);
    const auto environment = arena.domain->make();
    // What a model says depends on the episode, and fills the context of that one alone.
    const bool is_model = course.user_voice != nullptr;
    const auto user = is_model ? std::make_unique<NoUser>() : arena.make_user();
    Episode episode(*environment, *user);
    std::vector<TaskKey> easier;
    for (const auto& key : column.learning) {
      if (options.ramp > 0) easier.push_back(course.easier(key));
    }
    for (const auto* keys : {&column.learning, &column.evaluation, &std::as_const(easier)}) {
      for (const auto& key : *keys) {
        auto seen = episode.begin(key, 0);
        if (episode.over()) continue;  // its environment died
        if (is_model) seen = episode.scene().history;
        const auto tokens =
            encode_chat(tokenizer, course.text.prompt(episode.scene(), seen)).size();
        if (static_cast<int64_t>(tokens) < options.context) continue;
        throw ConfigError(fmt::format(
            "[three_domain] --context {}: the task {} begins with {} tokens, before the agent has "
            "said a word",
            options.context, name_of(key), tokens));
      }
    }
  }
}

}  // namespace

RunOptions with_lanes_of_run(RunOptions options, const comm::Group& group, int64_t ranks) {
  const std::string mine =
      group.rank() == 0 ? std::to_string(lanes_in(options.output_dir)) : std::string();
  const int64_t lanes = std::stoll(group.broadcast_bytes(mine, 0, {.label = "lanes"}));
  if (options.lanes == 0 && lanes >= ranks) options.lanes = lanes;
  return options;
}

RunOptions completed(RunOptions options, int64_t ranks) {
  if (options.lanes == 0) options.lanes = ranks;
  options.check();
  if (options.lanes < ranks) {
    throw ConfigError(fmt::format("[three_domain] --lanes {} for {} ranks: each rank needs one",
                                  options.lanes, ranks));
  }
  return options;
}

std::string first_problem(const comm::Group& group, const std::string& mine,
                          std::optional<std::chrono::milliseconds> timeout) {
  for (const auto& of_rank :
       group.all_gather_bytes(mine, {.timeout = timeout, .label = "problems"})) {
    if (!of_rank.empty()) return of_rank;
  }
  return "";
}

void agree_on(const comm::Group& group, const std::function<void()>& step,
              std::optional<std::chrono::milliseconds> timeout) {
  std::string problem;
  try {
    step();
  } catch (...) {
    problem = comm::told_text();
  }
  const std::string first = first_problem(group, problem, timeout);
  if (!first.empty()) comm::throw_told(first);
}

void check_alike(const comm::Group& group, const RunOptions& mine) {
  auto options = mine.as_text();
  // They may change when a run resumes, and decide which collectives there are.
  options["save-every"] = fmt::format("{}", mine.save_every);
  options["strict-save"] = fmt::format("{}", mine.strict_save);
  options["export-hf"] = fmt::format("{}", mine.export_hf);
  const auto all = group.all_gather_bytes(lines_of(options), {.label = "options"});
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    std::istringstream first(all[0]), other(all[rank]);
    for (std::string a, b; std::getline(first, a) && std::getline(other, b);) {
      if (a == b) continue;
      throw ConfigError(fmt::format("[three_domain] rank 0 has {}, rank {} has {}", a, rank, b));
    }
  }
}

std::string model_folder(const std::string& model) {
  if (fs::is_directory(model)) return model;
  std::string hub = env_text("HOME").value_or("") + "/.cache/huggingface/hub";
  if (const auto home = env_text("HF_HOME")) hub = *home + "/hub";
  if (const auto cache = env_text("HF_HUB_CACHE")) hub = *cache;
  std::string name = model;
  for (size_t at = 0; (at = name.find('/', at)) != std::string::npos; at += 2) {
    name.replace(at, 1, "--");
  }
  const std::string kept = hub + "/models--" + name;
  std::string revision;
  std::ifstream(kept + "/refs/main") >> revision;
  const std::string folder = kept + "/snapshots/" + revision;
  if (!revision.empty() && fs::is_directory(folder)) return folder;
  throw ConfigError(fmt::format(
      "[three_domain] --model {} is neither a folder nor a name in {}: hf download {} brings it "
      "there. It takes config.json, tokenizer.json (or a .tiktoken file), and model.safetensors or "
      "model.safetensors.index.json with its shards",
      model, hub, model));
}

std::string find_model(const comm::Group& group, const std::string& model) {
  if (model.empty()) return "";
  std::string folder;
  agree_on(group, [&] { folder = model_folder(model); });
  return folder;
}

void check_lengths(const comm::Group& group, const Course& course, const Curriculum& curriculum,
                   const text::Tokenizer& tokenizer, const RunOptions& options,
                   int64_t max_length) {
  const auto check = [&] {
    if (options.context > max_length) {
      throw ConfigError(
          fmt::format("[three_domain] --context {} is more than the {} positions of {}",
                      options.context, max_length, options.model));
    }
    if (group.rank() == 0) refuse_too_long(course, curriculum, tokenizer, options);
  };
  // Rank 0 begins each task, which takes the others nothing.
  agree_on(group, check, std::chrono::seconds(options.rollout_timeout));
}

bool prepare_directory(const comm::Group& group, RunOptions options,
                       std::optional<checkpoint::FolderLock>& lock) {
  std::string problem;
  const auto claim = [&] {
    std::error_code error;
    fs::create_directories(options.output_dir, error);
    if (error) throw Error(error.message());
    lock.emplace(options.output_dir, ".run.lock", "in use",
                 "writes the files of a run here: give this run another directory, or end that "
                 "one");
    options.resume = options.resume || is_restarted_job(options.output_dir);
    if (fs::exists(options.output_dir + "/" + kOptionsFile)) problem = difference(options);
    if (problem.empty()) write_job_file(options.output_dir);
  };
  agree_on(group, [&] {
    if (group.rank() != 0) return;
    try {
      claim();
    } catch (const std::exception& error) {
      problem = fmt::format("[three_domain] --output-dir {}: {}", options.output_dir, error.what());
    }
    if (!problem.empty()) throw ConfigError(problem);
  });
  return !group.broadcast_bytes(options.resume ? "goes on" : "").empty();
}

void claim_directory(const comm::Group& group, const RunOptions& options) {
  const std::string file = options.output_dir + "/" + kOptionsFile;
  agree_on(group, [&] {
    if (group.rank() == 0 && !fs::exists(file))
      train::write_whole(file, lines_of(options.as_text()));
  });
}

}  // namespace lockstep::rl
