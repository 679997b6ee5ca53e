// The effective configuration as a file.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>

#include "lockstep/train/config.h"
#include "lockstep/train/config_texts.h"
#include "train/config/curriculum.h"
#include "train/config/replaced.h"
#include "train/config/schema.h"
#include "train/config/value.h"

namespace lockstep::train {
namespace {

constexpr size_t kCommentColumn = 44;

// What only says more about another key, and would hide those that count.
constexpr std::array kOnlyWhenSet = {"training.early_stopping.mode",
                                     "training.early_stopping.patience",
                                     "training.early_stopping.min_delta",
                                     "training.top_k",
                                     "parallel.hook_rank",
                                     "parallel.hook_start_step",
                                     "parallel.hook_fraction",
                                     "parallel.sync_bn_group_size",
                                     "mixed_precision.initial_scale",
                                     "mixed_precision.growth_interval",
                                     "checkpoint.save_steps",
                                     "checkpoint.best_mode",
                                     "checkpoint.restore_best"};

class Lines {
 public:
  explicit Lines(const RunConfig& config) : config_(config) {}

  void section(const std::string& name) {
    text_ += fmt::format("{}{}:\n", text_.empty() ? "" : "\n", name);
    group_.clear();
  }
  // `name`: after the section.
  void add(const std::string& path, const std::string& name, const std::string& value) {
    const auto dot = name.find('.');
    const std::string group = dot == name.npos ? "" : name.substr(0, dot);
    if (group != group_ && !group.empty()) text_ += fmt::format("  {}:\n", group);
    group_ = group;
    const std::string line = fmt::format("{}{}: {}", group.empty() ? "  " : "    ",
                                         dot == name.npos ? name : name.substr(dot + 1), value);
    const auto found = config_.origins.find(path);
    std::string from = found == config_.origins.end() ? "default" : found->second;
    for (char& c : from) {
      if (static_cast<unsigned char>(c) < 0x20) c = ' ';  // a comment ends with its line
    }
    text_ += fmt::format("{:<{}}  # {}\n", line, kCommentColumn, from);
  }
  std::string text() && { return std::move(text_); }

 private:
  const RunConfig& config_;
  std::string text_, group_;
};

// Calls section() for each section, and add() for each key that has a meaning in this run.
template <class Section, class Add>
void visit(const RunConfig& config, const ConfigExtensions& extensions, const Section& begin,
           const Add& add) {
  const Schema schema(extensions);
  for (const std::string& section : schema.sections()) {
    const std::string kind_key = schema.kind_key(section);
    const std::string kind =
        kind_key.empty() ? "" : std::get<std::string>(schema.find(kind_key, "")->load(config));
    begin(section);
    for (const Key& key : schema.keys()) {
      if (key.section() != section || !belongs_to(key, kind)) continue;
      if (key.path.starts_with("parallel.fsdp.") && config.parallel.strategy != "fsdp") continue;
      const bool is_aside =
          std::find(kOnlyWhenSet.begin(), kOnlyWhenSet.end(), key.path) != kOnlyWhenSet.end();
      if (is_aside && !config.origins.contains(key.path) && key.load(config) == key.fallback) {
        continue;
      }
      // Reading it back would refuse it, or say that it has no effect.
      if (!config.origins.contains(key.path) && !replaced_by(config, key.path).empty()) continue;
      add(key.path, key.name(), text_of(key.load(config)));
    }
    if (section == "training") {
      add(kCurriculum, "curriculum", text_of(config.training.curriculum));
    }
  }
}

}  // namespace

std::string show_config(const RunConfig& config, const ConfigExtensions& extensions) {
  Lines lines(config);
  visit(
      config, extensions, [&](const std::string& section) { lines.section(section); },
      [&](const std::string& path, const std::string& name, const std::string& value) {
        lines.add(path, name, value);
      });
  return std::move(lines).text();
}

std::map<std::string, std::string> config_texts(const RunConfig& config,
                                                const ConfigExtensions& extensions) {
  std::map<std::string, std::string> texts;
  visit(
      config, extensions, [](const std::string&) {},
      [&](const std::string& path, const std::string&, const std::string& value) {
        texts[path] = value;
      });
  return texts;
}

}  // namespace lockstep::train
