// From a file, the environment and the command line to a RunConfig.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "core/files/read_file.h"
#include "core/nearest.h"
#include "lockstep/train/config.h"
#include "lockstep/train/config_source.h"
#include "train/config/before_start.h"
#include "train/config/checks.h"
#include "train/config/curriculum.h"
#include "train/config/flat_keys.h"
#include "train/config/replaced.h"
#include "train/config/schema.h"
#include "train/config/settings.h"
#include "train/config/value.h"

namespace lockstep::train {
namespace {

class Loading {
 public:
  Loading(const Schema& schema, std::string name) : schema_(schema), name_(std::move(name)) {}

  // `starts`: what its ranks would refuse is refused, too.
  RunConfig load(const ConfigSource& source, Settings::Empty empty, bool starts,
                 const std::vector<std::string>& overrides);

 private:
  // Of settings of one path the one that counts: of the last place in which there is any.
  void choose(const std::vector<Setting>& settings);
  bool say_the_same(const Setting& one, const Setting& other) const;
  void store_kinds();
  void store(const Setting& setting);
  void check_backend(const std::vector<Setting>& settings);
  void total_processes();
  void infer_save_strategy();
  void infer_best_metric();
  void note(const Setting& setting) {
    config_.origins[setting.path] = setting.origin.text;
    origins_[setting.path] = setting.origin;
  }
  std::string kind_of(const std::string& path) const;

  const Schema& schema_;
  std::string name_;
  Problems problems_;
  RunConfig config_;
  std::map<std::string, Setting> chosen_;
  std::map<std::string, Origin> origins_;
  std::set<std::string> wrong_kinds_;  // sections whose kind is not known
};

// Whether two settings of one path have one value, also as 3 and 3.0, or yes and true.
bool Loading::say_the_same(const Setting& one, const Setting& other) const {
  if (one.node.IsScalar() && other.node.IsScalar() && one.node.Scalar() == other.node.Scalar()) {
    return true;
  }
  for (const Key* key : schema_.all(one.path)) {
    Value left, right;
    std::string error;
    if (read_value(one.node, key->fallback, left, error) &&
        read_value(other.node, key->fallback, right, error)) {
      return left == right;
    }
  }
  return false;
}

void Loading::choose(const std::vector<Setting>& settings) {
  for (const Setting& setting : settings) {
    const auto [found, is_new] = chosen_.try_emplace(setting.path, setting);
    if (is_new) continue;
    const Setting& before = found->second;
    if (before.layer == setting.layer && !say_the_same(before, setting)) {
      problems_.add(setting.origin,
                    fmt::format("{} says something else than {} in {}: give one of them",
                                setting.written, before.written, before.origin.text));
    }
    if (before.layer > setting.layer) continue;
    chosen_.erase(found);  // a node that is assigned to changes the other one, too
    chosen_.emplace(setting.path, setting);
  }
}

std::string Loading::kind_of(const std::string& path) const {
  const std::string section = path.substr(0, path.find('.'));
  const std::string key = schema_.kind_key(section);
  return key.empty() ? "" : std::get<std::string>(schema_.find(key, "")->load(config_));
}

void Loading::store_kinds() {
  for (const std::string& section : schema_.sections()) {
    const auto found = chosen_.find(schema_.kind_key(section));
    if (found == chosen_.end()) continue;
    store(found->second);
    if (!origins_.contains(section + ".kind")) wrong_kinds_.insert(section);
  }
}

void Loading::store(const Setting& setting) {
  const std::string section = setting.path.substr(0, setting.path.find('.'));
  const Key* key = schema_.find(setting.path, kind_of(setting.path));
  if (key == nullptr) {
    if (wrong_kinds_.contains(section)) return;  // its keys are not known
    std::string kinds;
    for (const Key* other : schema_.all(setting.path)) {
      for (const auto& kind : other->kinds) kinds += (kinds.empty() ? "" : ", ") + kind;
    }
    const std::string kind_key = section + ".kind";
    const auto given = origins_.find(kind_key);
    problems_.add(setting.origin,
                  fmt::format("{} belongs to {} {}, and {} is {} ({})", setting.path, kind_key,
                              kinds, kind_key, kind_of(setting.path),
                              given == origins_.end() ? "the default" : given->second.text));
    return;
  }
  Value value;
  std::string error;
  if (!read_value(setting.node, key->fallback, value, error)) {
    problems_.add(setting.value_origin,
                  fmt::format("{}: {}; expected {}", setting.written, error, range_of(*key)));
    return;
  }
  // Many YAML libraries read a bare no as false, and write that.
  const bool has_no =
      std::find(key->allowed.begin(), key->allowed.end(), "no") != key->allowed.end();
  if (auto* word = std::get_if<std::string>(&value);
      word != nullptr && has_no && (*word == "false" || *word == "False")) {
    *word = "no";
  }
  // As resume_from_checkpoint of the transformers Trainer.
  if (auto* word = std::get_if<std::string>(&value); word && key->path == "checkpoint.resume") {
    if (*word == "true" || *word == "True") *word = "latest";
    if (*word == "false" || *word == "False") word->clear();
  }
  if (const std::string fault = fault_of(*key, value); !fault.empty()) {
    const auto* text = std::get_if<std::string>(&value);
    const std::string advice =
        text != nullptr && !key->allowed.empty() ? hint_of(text->substr(0, 60), key->allowed) : "";
    problems_.add(setting.value_origin,
                  fmt::format("{}: {} is not {}{}", setting.written,
                              setting.node.IsScalar() ? excerpt(setting.node) : text_of(value),
                              range_of(*key), advice));
    return;
  }
  key->store(config_, value);
  note(setting);
}

// The variable overrides what World is told, so that the command line cannot.
void Loading::check_backend(const std::vector<Setting>& settings) {
  for (const Setting& variable : settings) {
    const auto found = chosen_.find(variable.path);
    if (variable.layer != 1 || found == chosen_.end() || found->second.layer < 2) continue;
    if (!variable.written.starts_with("LOCKSTEP") || !variable.node.IsScalar()) continue;
    if (say_the_same(found->second, variable)) continue;
    problems_.add(found->second.origin,
                  fmt::format("contradicts the {}: unset the variable", variable.origin.text));
  }
}

// accelerate's num_processes counts the ranks of all machines.
void Loading::total_processes() {
  const auto ranks = chosen_.find("launch.nproc_per_node");
  if (ranks == chosen_.end() || ranks->second.written != "num_processes") return;
  int64_t total = 0, machines = 1;
  Value value;
  std::string error;
  if (!read_value(ranks->second.node, Value(int64_t{0}), value, error)) {
    problems_.add(ranks->second.value_origin, fmt::format("num_processes: {}", error));
    chosen_.erase(ranks);
    return;
  }
  total = std::get<int64_t>(value);
  const auto hosts = chosen_.find("launch.nnodes");
  if (hosts != chosen_.end() && read_value(hosts->second.node, Value(int64_t{0}), value, error)) {
    machines = std::max<int64_t>(1, std::get<int64_t>(value));
  }
  if (total < 1 || total % machines != 0) {
    problems_.add(ranks->second.value_origin,
                  fmt::format("num_processes: {} over num_machines {}: each machine gets the same "
                              "number of ranks, 1 or more",
                              total, machines));
    chosen_.erase(ranks);
    return;
  }
  ranks->second.node.reset(YAML::Node(std::to_string(total / machines)));
}

// Who says after how many steps wants them to count.
void Loading::infer_save_strategy() {
  const auto steps = chosen_.find("checkpoint.save_steps");
  if (steps == chosen_.end() || chosen_.contains("checkpoint.save_strategy")) return;
  config_.checkpoint.save_strategy = "steps";
  config_.origins["checkpoint.save_strategy"] =
      fmt::format("because of {} in {}", steps->second.written, steps->second.origin.text);
}

// The transformers Trainer's load_best_model_at_end means the loss where it says no more.
void Loading::infer_best_metric() {
  const auto found = chosen_.find("checkpoint.restore_best");
  if (found == chosen_.end() || found->second.written != "load_best_model_at_end" ||
      !config_.checkpoint.restore_best || chosen_.contains("checkpoint.best_metric")) {
    return;
  }
  config_.checkpoint.best_metric = "loss";
  config_.origins["checkpoint.best_metric"] =
      fmt::format("because of {} in {}", found->second.written, found->second.origin.text);
}

RunConfig Loading::load(const ConfigSource& source, Settings::Empty empty, bool starts,
                        const std::vector<std::string>& overrides) {
  Settings settings(schema_, problems_, config_.remarks);
  settings.read_file(source.text, name_, empty);
  settings.read_environment();
  for (const LaunchFlag& flag : source.flags) {
    if (!Settings::overrides(flag)) settings.read_flag(flag);
  }
  for (const std::string& one : overrides) settings.read_override(one);
  for (const LaunchFlag& flag : source.flags) {
    if (Settings::overrides(flag)) settings.read_flag(flag);
  }
  choose(settings.list());
  total_processes();
  store_kinds();
  infer_save_strategy();
  for (const auto& [path, setting] : chosen_) {
    if (path == kCurriculum) {
      config_.training.curriculum = read_curriculum(setting, name_, problems_);
      note(setting);
    } else if (path != schema_.kind_key(setting.path.substr(0, setting.path.find('.')))) {
      store(setting);
    }
  }
  infer_best_metric();
  check_backend(settings.list());
  const auto origin_of = [this](const std::string& path) {
    const auto found = origins_.find(path);
    return found != origins_.end() ? found->second : Origin{fmt::format("{}:1:1", name_), 1};
  };
  const auto is_given = [this](const std::string& path) { return origins_.contains(path); };
  for (const Key& key : schema_.keys()) {
    const std::string kind_key = schema_.kind_key(key.section());
    if (!key.required || chosen_.contains(key.path) || !belongs_to(key, kind_of(key.path)))
      continue;
    problems_.add(origin_of(kind_key),
                  kind_key.empty() || key.kinds.empty()
                      ? fmt::format("{} is missing: {}", key.path, range_of(key))
                      : fmt::format("{} {} needs {}: {}", kind_key, kind_of(key.path), key.path,
                                    range_of(key)));
  }
  check_together(schema_, config_, origin_of, is_given, problems_);
  if (starts) {
    config_.file = name_;
    refuse_before_start(config_, [&](const std::string& path, const std::string& what) {
      problems_.add(origin_of(path), fmt::format("{}: {}", path, what));
    });
  }
  problems_.raise(name_);
  note_fsdp(config_);
  note_replaced(config_);
  for (const Key& key : schema_.keys()) {
    key.store(config_, key.load(config_));  // declared keys get their defaults
  }
  return std::move(config_);
}

}  // namespace

bool is_better_lower(std::string_view metric) {
  static const std::set<std::string_view> kLower = {"perplexity", "mse", "rmse", "mae",
                                                    "cross_entropy"};
  return kLower.contains(metric) || metric.ends_with("loss") || metric.ends_with("error");
}

RunConfig parse_config(const std::string& text, const std::string& name,
                       const std::vector<std::string>& overrides,
                       const ConfigExtensions& extensions) {
  const Schema schema(extensions);
  return Loading(schema, name)
      .load({.name = name, .text = text}, Settings::Empty::Defaults, false, overrides);
}

RunConfig load_config(const ConfigSource& source, const std::vector<std::string>& overrides,
                      const ConfigExtensions& extensions) {
  const Schema schema(extensions);
  // Another process may have read the pipe before.
  std::error_code none;
  const bool is_file = std::filesystem::is_regular_file(source.name, none);
  return Loading(schema, source.name)
      .load(source, is_file ? Settings::Empty::Defaults : Settings::Empty::Problem, true,
            overrides);
}

RunConfig load_config(const std::string& path, const std::vector<std::string>& overrides,
                      const ConfigExtensions& extensions) {
  return load_config(ConfigSource{.name = path, .text = read_file(path, "[config] " + path)},
                     overrides, extensions);
}

void check_config(const RunConfig& config, const ConfigExtensions& extensions) {
  const Schema schema(extensions);
  Problems problems;
  const auto origin_of = [&config](const std::string& path) {
    const auto found = config.origins.find(path);
    return Origin{found == config.origins.end() ? "in the program" : found->second};
  };
  // A program gives what differs from the default.
  const auto is_given = [&](const std::string& path) {
    for (const Key* key : schema.all(path)) {
      if (key->load(config) != key->fallback) return true;
    }
    return false;
  };
  for (const Key& key : schema.keys()) {
    const std::string kind_key = schema.kind_key(key.section());
    const Key* kind = kind_key.empty() ? nullptr : schema.find(kind_key, "");
    if (kind != nullptr && !belongs_to(key, std::get<std::string>(kind->load(config)))) continue;
    const Value value = key.load(config);
    if (value.index() != key.fallback.index()) {
      problems.add(origin_of(key.path), fmt::format("{}: expected {}", key.path, range_of(key)));
    } else if (!fault_of(key, value).empty()) {
      problems.add(origin_of(key.path),
                   fmt::format("{}: {} is not {}", key.path, text_of(value), range_of(key)));
    }
  }
  for (const auto& stage : config.training.curriculum) {
    if (const std::string fault = fault_of(stage); !fault.empty()) {
      problems.add(origin_of(kCurriculum), fmt::format("{}: {}", kCurriculum, fault));
    }
  }
  check_together(schema, config, origin_of, is_given, problems);
  problems.raise("the program's configuration");
}

}  // namespace lockstep::train
