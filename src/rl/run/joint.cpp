// A run on all domains at once, with which another is compared.
#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/core/error.h"
#include "rl/run/setup.h"

namespace lockstep::rl {
namespace {

using Json = nlohmann::ordered_json;

// What a reward depends on beside what was learnt.
constexpr const char* kMeasured[] = {
    "model",          "env",        "user",        "solo",        "tasks-per-domain",
    "learning-ratio", "eval-tasks", "eval-trials", "difficulty",  "eval-temperature",
    "max-new-tokens", "max-turns",  "context",     "chat-format", "seed"};

// The same, and what runs had before there were these options.
constexpr std::pair<const char*, const char*> kMeasuredSince[] = {{"mixed", "refuse"},
                                                                  {"parallel-calls", "false"}};

// Of a file with tasks its digest tells what is in it, wherever it is.
std::string tasks_of(const std::string& file) {
  const size_t digest = file.rfind(" (");
  const bool is_known = digest != file.npos && !file.ends_with("(cannot be read)");
  return is_known ? file.substr(digest) : file;
}

ConfigError measured_with(const std::string& name, const std::string& theirs,
                          const std::string& ours) {
  const auto shown = [](const std::string& value) { return value.empty() ? "''" : value; };
  return ConfigError(
      fmt::format("was measured with --{} {}, this run with {}", name, shown(theirs), shown(ours)));
}

// A domain whose tasks no file has may be absent, or there with an empty value.
void check_tasks(const Json& theirs, const std::map<std::string, std::string>& ours,
                 const std::vector<std::string>& domains) {
  for (const auto& domain : domains) {
    const std::string name = domain + "-tasks";
    const auto found = ours.find(name);
    const std::string mine = found == ours.end() ? "" : found->second;
    const std::string other = theirs.value(name, "");
    if (tasks_of(other) != tasks_of(mine)) throw measured_with(name, other, mine);
  }
}

// Throws ConfigError, whose text begins after the folder's name.
std::map<std::string, double> read_joint(const RunOptions& options) {
  std::ifstream file(options.joint_run + "/results.json");
  const Json results = Json::parse(file, nullptr, false);
  if (!results.is_object()) throw ConfigError("has no results.json that can be read");
  const Json& config = results.at("config");
  if (config.value("joint", "") != "true") throw ConfigError("is not a run with --joint");
  const auto mine = options.as_text();
  for (const char* name : kMeasured) {
    const std::string theirs = config.at(name), ours = mine.at(name);
    if (theirs != ours) throw measured_with(name, theirs, ours);
  }
  for (const auto& [name, before] : kMeasuredSince) {
    const std::string theirs = config.value(name, before), ours = mine.at(name);
    if (theirs != ours) throw measured_with(name, theirs, ours);
  }
  check_tasks(config, mine, options.order);
  const Json& matrix = results.at("matrix");
  const auto columns = matrix.at("columns").get<std::vector<std::string>>();
  const auto rows = matrix.at("R").get<std::vector<std::vector<double>>>();
  if (rows.size() != 2 || rows[1].size() != columns.size()) {
    throw ConfigError("is not over yet: --resume continues it");
  }
  std::map<std::string, double> out;
  for (size_t j = 0; j < columns.size(); ++j) out[columns[j]] = rows[1][j];
  for (const auto& domain : options.order) {
    if (!out.contains(domain)) throw ConfigError(fmt::format("has not learnt {}", domain));
  }
  return out;
}

}  // namespace

std::map<std::string, double> joint_rewards(const comm::Group& group, const RunOptions& options) {
  std::map<std::string, double> out;
  agree_on(group, [&] {
    if (group.rank() != 0 || options.joint_run.empty()) return;
    try {
      out = read_joint(options);
    } catch (const std::exception& error) {
      throw ConfigError(
          fmt::format("[three_domain] --joint-run {} {}", options.joint_run, error.what()));
    }
  });
  return out;
}

}  // namespace lockstep::rl
