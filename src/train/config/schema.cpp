#include "train/config/schema.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "train/config/flat_keys.h"
#include "train/config/value.h"

namespace lockstep::train {
namespace {

bool contains(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

bool is_word(const std::string& name) {
  const auto is_good = [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  };
  return !name.empty() && std::all_of(name.begin(), name.end(), is_good);
}

[[noreturn]] void refuse_extension(const std::string& name, const std::string& why) {
  throw ConfigError(fmt::format("[config] the program declares {}: {}", name, why));
}

std::string fault_of_number(const Key& key, double value) {
  const auto& [least, most, above_least] = key.limits;
  const bool good =
      (!least || value > *least || (value == *least && !above_least)) && (!most || value <= *most);
  return good ? "" : "is out of range";
}

struct Check {
  const Key& key;
  std::string operator()(bool) const { return ""; }
  std::string operator()(int64_t one) const {
    return fault_of_number(key, static_cast<double>(one));
  }
  std::string operator()(double one) const { return fault_of_number(key, one); }
  std::string operator()(const std::string& one) const {
    if (key.allowed.empty() || contains(key.allowed, one)) return "";
    const auto* fallback = std::get_if<std::string>(&key.fallback);
    return fallback != nullptr && one == *fallback ? "" : "is not there";
  }
  template <class T>
  std::string operator()(const std::vector<T>& list) const {
    for (const T& one : list) {
      if (const std::string fault = (*this)(one); !fault.empty()) return fault;
    }
    return "";
  }
};

}  // namespace

Schema::Schema(const ConfigExtensions& extensions) {
  KeyList list(keys_);
  add_model_keys(list);
  add_data_keys(list);
  add_training_keys(list);
  add_parallel_keys(list);
  add_run_keys(list);
  extend(extensions);
  for (const Key& key : keys_) {
    if (!contains(sections_, key.section())) sections_.push_back(key.section());
  }
}

void Schema::extend(const ConfigExtensions& extensions) {
  extend_kinds("model", extensions.models);
  extend_kinds("data", extensions.datasets);
  extend_kinds("optimizer", extensions.optimizers);
  for (Key& key : keys_) {
    if (key.path != "training.loss" && key.path != "training.metrics") continue;
    for (const auto& name : key.path == "training.loss" ? extensions.losses : extensions.metrics) {
      if (!is_word(name)) refuse_extension("'" + name + "'", "it is not a word in lower case");
      if (contains(key.allowed, name)) refuse_extension(key.path + " " + name, "it is there");
      key.allowed.push_back(name);
    }
  }
  for (const auto& [section, declared] : extensions.sections) {
    const std::string name = "section " + section;
    if (!is_word(section)) refuse_extension(name, "it is not a word in lower case");
    if (!all(section + ".kind").empty() || is_group(section) || is_flat_key(section)) {
      refuse_extension(name, "there is a section or key of that name");
    }
    for (const KeyDeclaration& one : declared) declare(section, {}, one);
  }
}

void Schema::extend_kinds(const std::string& section,
                          const std::map<std::string, ConfigExtensions::Keys>& kinds) {
  for (const auto& [kind, declared] : kinds) {
    const std::string name = fmt::format("{}.kind {}", section, kind);
    if (!is_word(kind)) refuse_extension(name, "it is not a word in lower case");
    for (Key& key : keys_) {
      if (key.path != section + ".kind") continue;
      if (contains(key.allowed, kind)) refuse_extension(name, "there is a kind of that name");
      key.allowed.push_back(kind);
    }
    for (const KeyDeclaration& one : declared) declare(section, {kind}, one);
  }
}

void Schema::declare(const std::string& section, const std::vector<std::string>& kinds,
                     const KeyDeclaration& declared) {
  const std::string path = section + "." + declared.name;
  if (!is_word(declared.name)) refuse_extension(path, "it is not a word in lower case");
  for (const Key* other : all(path)) {
    const auto meets = [other](const std::string& kind) { return belongs_to(*other, kind); };
    if (kinds.empty() || std::any_of(kinds.begin(), kinds.end(), meets)) {
      refuse_extension(path, "there is a key of that name");
    }
  }
  const Value fallback = declared.fallback;
  Key key{.path = path,
          .kinds = kinds,
          .description = declared.description,
          .allowed = declared.allowed,
          .limits = {.least = declared.least, .most = declared.most},
          .required = declared.required,
          .fallback = fallback};
  key.load = [path, fallback](const RunConfig& config) {
    const auto found = config.extra.find(path);
    return found == config.extra.end() ? fallback : found->second;
  };
  key.store = [path](RunConfig& config, const Value& value) { config.extra[path] = value; };
  if (!key.required && !fault_of(key, fallback).empty()) {
    refuse_extension(path,
                     fmt::format("its default {} is not {}", text_of(fallback), range_of(key)));
  }
  keys_.push_back(std::move(key));
}

const Key* Schema::find(const std::string& path, const std::string& kind) const {
  for (const Key& key : keys_) {
    if (key.path == path && belongs_to(key, kind)) return &key;
  }
  return nullptr;
}

std::vector<const Key*> Schema::all(const std::string& path) const {
  std::vector<const Key*> found;
  for (const Key& key : keys_) {
    if (key.path == path) found.push_back(&key);
  }
  return found;
}

bool Schema::is_group(const std::string& path) const {
  return std::any_of(keys_.begin(), keys_.end(),
                     [&path](const Key& key) { return key.path.starts_with(path + "."); });
}

bool Schema::is_section(const std::string& name) const { return contains(sections_, name); }

std::string Schema::kind_key(const std::string& section) const {
  const std::string path = section + ".kind";
  return all(path).empty() ? "" : path;
}

bool belongs_to(const Key& key, const std::string& kind) {
  return key.kinds.empty() || contains(key.kinds, kind);
}

std::string range_of(const Key& key) {
  if (!key.allowed.empty()) {
    const bool is_list = !std::holds_alternative<std::string>(key.fallback);
    return fmt::format("{} {}", is_list ? "some of" : "one of", fmt::join(key.allowed, ", "));
  }
  std::string text = type_of(key.fallback);
  const auto& [least, most, above_least] = key.limits;
  if (least && most && !above_least) {
    return fmt::format("{} from {} to {}", text, text_of_number(*least), text_of_number(*most));
  }
  if (least) {
    text += above_least ? fmt::format(" above {}", text_of_number(*least))
                        : fmt::format(", {} or more", text_of_number(*least));
  }
  if (most) text += fmt::format(", at most {}", text_of_number(*most));
  return text;
}

std::string fault_of(const Key& key, const Value& value) { return std::visit(Check{key}, value); }

}  // namespace lockstep::train
