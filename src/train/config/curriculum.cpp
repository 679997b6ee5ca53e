#include "train/config/curriculum.h"

#include <fmt/format.h>

#include "core/nearest.h"
#include "train/config/value.h"

namespace lockstep::train {
namespace {

constexpr size_t kMostStages = 1000;

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
  for (size_t i = 0; i < list.size(); ++i) {
    const YAML::Node& item = list[i];
    CurriculumStage stage;
    const auto refuse = [&](const YAML::Node& node, const std::string& what) {
      problems.add(at(node), fmt::format("curriculum: {}", what));
    };
    if (!item.IsMap()) {
      refuse(item,
             fmt::format("{} is not a stage, as {{epochs: 1, fraction: 0.5}}", excerpt(item)));
      continue;
    }
    std::vector<std::string> seen;
    bool is_good = true;
    for (const auto& entry : item) {
      const std::string name = entry.first.IsScalar() ? entry.first.Scalar().substr(0, 60) : "";
      for (const auto& other : seen) is_good &= other != name;
      if (!is_good) {
        refuse(entry.first, fmt::format("'{}' is there twice", name));
        break;
      }
      seen.push_back(name);
      Value value;
      std::string error;
      const auto read = [&](auto& member) {
        if (entry.second.IsNull()) return;  // `epochs:` says nothing
        is_good = read_value(entry.second, Value(member), value, error);
        if (is_good) member = std::get<std::decay_t<decltype(member)>>(value);
        if (!is_good) refuse(entry.second, fmt::format("{}: {}", name, error));
      };
      if (name == "epochs") {
        read(stage.epochs);
      } else if (name == "fraction") {
        read(stage.fraction);
      } else if (name == "path") {
        read(stage.path);
      } else if (name == "targets_path") {
        read(stage.targets_path);
      } else {
        is_good = false;
        refuse(entry.first,
               fmt::format("unknown key '{}'{}; a stage has epochs, fraction, path, targets_path",
                           name, hint_of(name, {"epochs", "fraction", "path", "targets_path"})));
      }
      if (!is_good) break;
    }
    if (!is_good) continue;
    if (const std::string fault = fault_of(stage); !fault.empty()) refuse(item, fault);
    stages.push_back(std::move(stage));
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
