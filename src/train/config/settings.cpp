#include "train/config/settings.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <sstream>
#include <utility>

#include "core/nearest.h"
#include "core/words.h"
#include "lockstep/core/environment.h"
#include "lockstep/train/config_source.h"
#include "train/config/curriculum.h"
#include "train/config/flat_keys.h"
#include "train/config/schema.h"
#include "train/config/value.h"

namespace lockstep::train {
namespace {

constexpr size_t kMostBytes = 1 << 20;
constexpr int kAfterFile = 1 << 24;  // lines a file cannot have
constexpr const char* kFsdp = "parallel.fsdp";

// Sections for which one word is their kind: `optimizer: adam`.
constexpr std::array kShort = {"model",    "data",           "optimizer",
                               "schedule", "weight_average", "mixed_precision"};

std::string short_key(const std::string& section) {
  return section + (section == "mixed_precision" ? ".dtype" : ".kind");
}

bool is_indented_with_tab(const std::string& text, int line) {
  std::istringstream lines(text);
  std::string read;
  while (line-- > 0) std::getline(lines, read);
  return read.substr(0, read.find_first_not_of(" \t")).find('\t') != read.npos;
}

// Whether a text has more than one document. YAML::LoadAll() would tell, but never returns with
// some texts, among them a comma and an unfinished UTF-8 sequence.
class SecondDocument : public YAML::EventHandler {
 public:
  std::optional<YAML::Mark> begins_at(const std::string& text) {
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    if (parser.HandleNextDocument(*this) && parser.HandleNextDocument(*this)) return start_;
    return std::nullopt;
  }

  void OnDocumentStart(const YAML::Mark& mark) override { start_ = mark; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t,
                const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                  YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}

 private:
  YAML::Mark start_;
};

}  // namespace

std::vector<std::string> keys_called(const Schema& schema, const std::string& name) {
  std::vector<std::string> paths;
  for (const Key& key : schema.keys()) {
    const bool is_new = std::find(paths.begin(), paths.end(), key.path) == paths.end();
    if (is_new && key.path.substr(key.path.rfind('.') + 1) == name) paths.push_back(key.path);
  }
  if (!paths.empty()) return paths;
  const FlatKey* flat = find_flat_key(name);
  if (flat == nullptr) return {};
  for (const auto& value : flat->translate(YAML::Node("1")).values) paths.push_back(value.path);
  return paths;
}

std::vector<std::string> overrides_for(const std::string& name, const std::string& value) {
  const Schema schema{{}};
  std::vector<std::string> overrides;
  if (const FlatKey* flat = find_flat_key(name)) {
    // What stands behind a flag without a value is another word.
    for (const std::string& said : {value.empty() ? "VALUE" : value, std::string("true")}) {
      for (const auto& [path, node] : flat->translate(YAML::Node(said)).values) {
        overrides.push_back(path + "=" + node.as<std::string>());
      }
      if (!overrides.empty()) return overrides;
    }
  }
  const bool is_path = !schema.all(name).empty();
  for (const std::string& path : is_path ? std::vector{name} : keys_called(schema, name)) {
    const auto keys = schema.all(path);
    const bool is_flag = !keys.empty() && std::holds_alternative<bool>(keys.front()->fallback);
    const std::string said = is_flag ? (value == "false" ? value : "true") : value;
    overrides.push_back(path + "=" + (said.empty() ? "VALUE" : said));
  }
  return overrides;
}

Origin Settings::at(const YAML::Node& node, const Origin& otherwise) const {
  if (layer_ > 0 || node.Mark().is_null()) return otherwise;
  const int line = node.Mark().line + 1;
  return {fmt::format("{}:{}:{}", file_, line, node.Mark().column + 1), line};
}

void Settings::read_file(const std::string& text, const std::string& name, Empty empty) {
  file_ = name;
  const Origin whole{fmt::format("{}:1:1", name), 1};
  if (text.size() > kMostBytes) {
    problems_.add(whole,
                  fmt::format("{} bytes; a configuration has at most {}", text.size(), kMostBytes));
    return;
  }
  try {
    const YAML::Node root = YAML::Load(text);
    if (const auto second = SecondDocument().begins_at(text)) {
      problems_.add(
          {fmt::format("{}:{}:{}", name, second->line + 1, second->column + 1), second->line + 1},
          "a second document begins; a run has one");
    }
    if (!root.IsDefined() || root.IsNull()) {
      if (empty == Empty::Defaults) return;
      return problems_.add(whole, "there is nothing in it; a run with all defaults is {}");
    }
    if (!root.IsMap()) {
      problems_.add(at(root, whole), "expected sections and keys as KEY: VALUE lines");
      return;
    }
    if (const YAML::Node program = root["program"]; program && !schema_.is_section("program")) {
      return problems_.add(at(program, whole),
                           "a file with 'program' has that program's flags for keys: `lockstep "
                           "train FILE` starts it; this command is for the trainer's own files");
    }
    if (const YAML::Node flags = root["three_domain"];
        flags && !schema_.is_section("three_domain")) {
      return problems_.add(at(flags, whole),
                           "a file with 'three_domain' is that program's: `lockstep train FILE` "
                           "starts it; this command is for the trainer's own files");
    }
    std::map<std::string, Origin> seen;
    for (const auto& entry : root) {
      const Origin origin = at(entry.first, whole);
      if (!entry.first.IsScalar()) {
        problems_.add(origin, "a key has to be a word");
        continue;
      }
      const auto [first, is_new] = seen.emplace(entry.first.Scalar(), origin);
      if (!is_new) {
        problems_.add(origin, fmt::format("'{}' is there twice, first in {}", entry.first.Scalar(),
                                          first->second.text));
        continue;
      }
      read_top(entry.first, entry.second, origin);
    }
  } catch (const YAML::Exception& error) {
    const int line = error.mark.is_null() ? 1 : error.mark.line + 1;
    const int column = error.mark.is_null() ? 1 : error.mark.column + 1;
    problems_.add({fmt::format("{}:{}:{}", name, line, column), line},
                  fmt::format("not YAML: {}{}", error.msg,
                              is_indented_with_tab(text, line)
                                  ? "; the line is indented with a tab, and YAML takes spaces"
                                  : ""));
  }
}

void Settings::read_top(const YAML::Node& key, const YAML::Node& value, const Origin& origin) {
  const std::string& name = key.Scalar();
  if (!schema_.is_section(name)) return read_key(name, value, origin);
  if (value.IsNull()) return;
  if (value.IsMap()) return read_group(value, name, origin);
  if (value.IsScalar() && std::find(kShort.begin(), kShort.end(), name) != kShort.end()) {
    return add(short_key(name), value, origin, name);
  }
  problems_.add(
      at(value, origin),
      fmt::format("section {} is {}; expected KEY: VALUE lines below it", name, excerpt(value)));
}

void Settings::read_group(const YAML::Node& map, const std::string& path, const Origin& whole) {
  std::map<std::string, Origin> seen;
  for (const auto& entry : map) {
    const Origin origin = at(entry.first, whole);
    if (!entry.first.IsScalar()) {
      problems_.add(origin, "a key has to be a word");
      continue;
    }
    const std::string& name = entry.first.Scalar();
    const auto [first, is_new] = seen.emplace(name, origin);
    if (!is_new) {
      problems_.add(origin,
                    fmt::format("'{}' is there twice, first in {}", name, first->second.text));
      continue;
    }
    read_key(path + "." + name, entry.second, origin);
  }
}

void Settings::read_key(const std::string& path, const YAML::Node& value, const Origin& origin) {
  const auto dot = path.rfind('.');
  const std::string written = dot == path.npos ? path : path.substr(dot + 1);
  if (!schema_.all(path).empty() || path == kCurriculum) return add(path, value, origin, written);
  if (schema_.is_group(path)) {
    if (value.IsMap()) return read_group(value, path, origin);
    if (value.IsNull()) return;
    return problems_.add(
        at(value, origin),
        fmt::format("{} is {}; expected KEY: VALUE lines below it", written, excerpt(value)));
  }
  const bool is_top = dot == path.npos;
  if (is_top && path == "fsdp_config") {
    if (value.IsMap()) return read_group(value, kFsdp, origin);
    if (value.IsNull()) return;
    return problems_.add(at(value, origin), "fsdp_config has to be a group of keys");
  }
  FlatMeaning meaning;
  const std::string parent = is_top ? "" : path.substr(0, dot);
  std::string fsdp = written.starts_with("fsdp_") ? written.substr(5) : written;
  if (!is_top && parent != kFsdp) fsdp.clear();
  const std::vector<std::string> names = fsdp_names();
  if (const FlatKey* flat = is_top ? find_flat_key(path) : nullptr) {
    if (value.IsNull()) return;
    meaning = flat->translate(value);
  } else if (!fsdp.empty() && std::find(names.begin(), names.end(), fsdp) != names.end()) {
    if (value.IsNull()) return;
    meaning = translate_fsdp(fsdp, value);
  } else {
    return refuse_unknown(written, path, origin);
  }
  if (!meaning.problem.empty()) {
    return problems_.add(at(value, origin), fmt::format("{}: {}", written, meaning.problem));
  }
  if (!meaning.remark.empty()) {
    remarks_.push_back(fmt::format("{}: {} {}", origin.text, written, meaning.remark));
  }
  for (const auto& [target, node] : meaning.values) {
    settings_.push_back({target, node, origin, at(value, origin), written, layer_});
  }
}

void Settings::add(const std::string& path, const YAML::Node& value, const Origin& origin,
                   const std::string& written) {
  if (value.IsNull()) return;  // `key:` says nothing
  // Names that FSDP has of its own need their values translated.
  const std::string prefix = std::string(kFsdp) + ".";
  if (path.starts_with(prefix)) {
    for (const auto& [target, node] : translate_fsdp(path.substr(prefix.size()), value).values) {
      settings_.push_back({target, node, origin, at(value, origin), written, layer_});
    }
    return;
  }
  settings_.push_back({path, value, origin, at(value, origin), written, layer_});
}

void Settings::refuse_unknown(const std::string& last, const std::string& path,
                              const Origin& origin) {
  std::vector<std::string> beside;
  // A name with a dot may belong to no section.
  const bool is_top = !schema_.is_section(path.substr(0, path.find('.'))) || path == last;
  const std::string& written = is_top ? path : last;
  const std::string parent = is_top ? "" : path.substr(0, path.rfind('.') + 1);
  for (const Key& key : schema_.keys()) {
    if (is_top || !key.path.starts_with(parent)) continue;
    const std::string rest = key.path.substr(parent.size());
    beside.push_back(rest.substr(0, rest.find('.')));
  }
  if (parent == "training.") beside.emplace_back("curriculum");
  if (beside.empty()) beside = schema_.sections();
  if (is_top) {
    beside = schema_.sections();
    for (const FlatKey& flat : flat_keys()) beside.push_back(flat.name);
  }
  const std::string where = is_top ? "" : " in " + parent.substr(0, parent.size() - 1);
  const std::vector<std::string> elsewhere = keys_called(schema_, last);
  const std::string hint = hint_of(written.substr(0, 60), beside);
  problems_.add(origin, fmt::format("unknown key '{}'{}{}", written.substr(0, 60), where,
                                    !elsewhere.empty() ? "; it is " + elsewhere.front()
                                    : hint.empty() ? "; `lockstep config reference` lists all keys"
                                                   : hint));
}

void Settings::read_environment() {
  layer_ = 1;
  const auto take = [this](const char* name, const std::string& path, const std::string& value) {
    const Origin origin{fmt::format("environment {}={}", name, env_text(name).value_or("")),
                        kAfterFile + order_++};
    settings_.push_back({path, YAML::Node(value), origin, origin, name, layer_});
  };
  constexpr std::array<std::pair<const char*, const char*>, 2> kOurs = {
      {{"LOCKSTEP_BACKEND", "parallel.backend"}, {"LOCKSTEP_DEVICE", "parallel.device"}}};
  for (const auto& [name, path] : kOurs) {
    if (const auto value = env_text(name)) take(name, path, *value);
  }
  const auto refuse = [this](const char* name, const std::string& value, const char* expected) {
    problems_.add({fmt::format("environment {}={}", name, value), kAfterFile + order_++},
                  fmt::format("{}: '{}' is {}", name, value, expected));
  };
  // Ranks take a whole number of seconds from it.
  const auto timeout = env_text("LOCKSTEP_TIMEOUT");
  if (timeout && timeout->find_first_not_of("0123456789") != timeout->npos) {
    refuse("LOCKSTEP_TIMEOUT", *timeout, "not a whole number of seconds");
  } else if (timeout) {
    take("LOCKSTEP_TIMEOUT", "parallel.timeout_seconds", *timeout);
  }
  if (const auto tls = env_text("LOCKSTEP_TLS"); tls == "0" || tls == "1") {
    take("LOCKSTEP_TLS", "parallel.tls", tls == "1" ? "true" : "false");
  } else if (tls) {
    refuse("LOCKSTEP_TLS", *tls, "neither 0 nor 1");
  }
  // accelerate's, which `lockstep run --config_file` sets for the ranks, to "no" also where nothing
  // was said. LOCKSTEP_MIXED_PRECISION tells that a flag said "no".
  const auto precision = env_text("ACCELERATE_MIXED_PRECISION");
  if (precision && (*precision != "no" || env_text("LOCKSTEP_MIXED_PRECISION") == "no")) {
    take("ACCELERATE_MIXED_PRECISION", "mixed_precision.dtype", *precision);
  }
  // With accelerate's words.
  const auto says_yes = [&](const char* name) {
    const auto value = env_text(name);
    if (!value) return false;
    const std::string word = lower_case(*value);
    for (const char* yes : {"1", "true", "t", "yes", "y", "on"}) {
      if (word == yes) return true;
    }
    for (const char* no : {"0", "false", "f", "no", "n", "off"}) {
      if (word == no) return false;
    }
    refuse(name, *value, "neither true nor false");
    return false;
  };
  if (says_yes("ACCELERATE_USE_CPU") && !env_text("LOCKSTEP_DEVICE")) {
    take("ACCELERATE_USE_CPU", "parallel.device", "cpu");
  }
  if (!says_yes("ACCELERATE_USE_FSDP")) return;
  take("ACCELERATE_USE_FSDP", "parallel.strategy", "fsdp");
  for (const std::string& name : fsdp_names()) {
    const std::string variable = "FSDP_" + upper_case(name);
    const auto value = env_text(variable.c_str());
    if (!value) continue;
    const Origin origin{fmt::format("environment {}={}", variable, *value), kAfterFile + order_++};
    const FlatMeaning meaning = translate_fsdp(name, YAML::Node(*value));
    if (!meaning.problem.empty()) problems_.add(origin, meaning.problem);
    for (const auto& [path, node] : meaning.values) {
      settings_.push_back({path, node, origin, origin, variable, layer_});
    }
  }
}

bool Settings::overrides(const LaunchFlag& flag) {
  return flag.key.starts_with("launch.") && flag.origin.starts_with("flag ");
}

void Settings::read_flag(const LaunchFlag& flag) {
  if (overrides(flag)) ++layer_;
  const Origin origin{flag.origin, kAfterFile + order_++};
  settings_.push_back({flag.key, YAML::Node(flag.value), origin, origin, flag.origin, layer_});
}

void Settings::read_override(const std::string& text) {
  ++layer_;  // later ones win
  layer_ = std::max(layer_, 2);
  const Origin origin{fmt::format("--set {}", text.substr(0, 200)), kAfterFile + order_++};
  const size_t equals = text.find('=');
  if (equals == text.npos || equals == 0) {
    return problems_.add(origin, "expected KEY=VALUE, as training.seed=3");
  }
  const std::string path = text.substr(0, equals);
  YAML::Node value;
  try {
    value = YAML::Load(text.substr(equals + 1));
  } catch (const YAML::Exception& error) {
    return problems_.add(origin, fmt::format("not YAML: {}", error.msg));
  }
  if (value.IsNull() || !value.IsDefined()) value = YAML::Node("");
  if (path.find('.') == path.npos) {
    YAML::Node key(path);
    return read_top(key, value, origin);
  }
  const std::string section = path.substr(0, path.find('.'));
  if (!schema_.is_section(section)) {
    return problems_.add(origin, fmt::format("unknown section '{}'{}; sections are {}", section,
                                             hint_of(section, schema_.sections()),
                                             fmt::join(schema_.sections(), ", ")));
  }
  read_key(path, value, origin);
}

}  // namespace lockstep::train
