#include "train/config/curriculum.h"

#include <fmt/format.h>

#include <functional>
#include <optional>
#include <set>
#include <utility>

#include "core/nearest.h"
#include "train/config/value.h"

namespace lockstep::train {
namespace {

constexpr size_t kMostStages = 1000;

using RefuseNode = std::function<void(const YAML::Node&, const std::string&)>;

// Reads the value of `key` into the stage. False after a refusal.
bool read_entry(const std::string& key, const std::pair<YAML::Node, YAML::Node>& entry,
                CurriculumStage& stage, const RefuseNode& refuse) {
  const auto read = [&](auto& member) {
    if (entry.second.IsNull()) return true;  // `epochs:` says nothing
    Value value;
    std::string error;
    const bool is_good = read_value(entry.second, Value(member), value, error);
    if (is_good) member = std::get<std::decay_t<decltype(member)>>(value);
    if (!is_good) refuse(entry.second, fmt::format("{}: {}", key, error));
    return is_good;
  };
  if (key == "epochs") return read(stage.epochs);
  if (key == "fraction") return read(stage.fraction);
  if (key == "path") return read(stage.path);
  if (key == "targets_path") return read(stage.targets_path);
  refuse(entry.first,
         fmt::format("unknown key '{}'{}; a stage has epochs, fraction, path, targets_path", key,
                     hint_of(key, {"epochs", "fraction", "path", "targets_path"})));
  return false;
}

// Nothing where it cannot be read. A stage that can be read and has a fault is refused, and
// returned.
std::optional<CurriculumStage> read_stage(const YAML::Node& item, const RefuseNode& refuse) {
  if (!item.IsMap()) {
    refuse(item, fmt::format("{} is not a stage, as {{epochs: 1, fraction: 0.5}}", excerpt(item)));
    return std::nullopt;
  }
  CurriculumStage stage;
  std::set<std::string> seen;
  for (const auto& entry : item) {
    const std::string key = entry.first.IsScalar() ? entry.first.Scalar().substr(0, 60) : "";
    if (!seen.insert(key).second) {
      refuse(entry.first, fmt::format("'{}' is there twice", key));
      return std::nullopt;
    }
    if (!read_entry(key, entry, stage, refuse)) return std::nullopt;
  }
  if (const std::string fault = fault_of(stage); !fault.empty()) refuse(item, fault);
  return stage;
}

}  // namespace

std::string fault_of(const CurriculumStage& stage) {
  if (stage.epochs < 1) return "epochs: a whole number, 1 or more";
  if (!(stage.fraction > 0 && stage.fraction <= 1)) return "fraction: a number above 0, at most 1";
  return "";
}

std::vector<CurriculumStage> read_curriculum(const Setting& setting, const std::string& file,
                                             Problems& problems) {
  std::vector<CurriculumStage> stages;
  const YAML::Node& list = setting.node;
  const auto at = [&](const YAML::Node& node) {
    if (setting.layer > 0 || node.Mark().is_null()) return setting.value_origin;
    const int line = node.Mark().line + 1;
    return Origin{fmt::format("{}:{}:{}", file, line, node.Mark().column + 1), line};
  };
  if (!list.IsSequence() || list.size() > kMostStages) {
    problems.add(setting.value_origin,
                 fmt::format("curriculum: {} is not a list of stages, as [{{epochs: 1, fraction: "
                             "0.5}}]",
                             excerpt(list)));
    return stages;
  }
  const RefuseNode refuse = [&](const YAML::Node& node, const std::string& what) {
    problems.add(at(node), fmt::format("curriculum: {}", what));
  };
  for (size_t i = 0; i < list.size(); ++i) {
    if (auto stage = read_stage(list[i], refuse)) stages.push_back(std::move(*stage));
  }
  return stages;
}

std::string text_of(const std::vector<CurriculumStage>& stages) {
  std::string text;
  for (const auto& stage : stages) {
    text += fmt::format("{}{{epochs: {}, fraction: {}", text.empty() ? "" : ", ", stage.epochs,
                        text_of_number(stage.fraction));
    if (!stage.path.empty()) text += ", path: " + quoted(stage.path);
    if (!stage.targets_path.empty()) text += ", targets_path: " + quoted(stage.targets_path);
    text += "}";
  }
  return "[" + text + "]";
}

}  // namespace lockstep::train
