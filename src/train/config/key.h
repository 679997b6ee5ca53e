// One key of a configuration: how it is called, what it takes, and where its value is kept.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/train/config.h"

namespace lockstep::train {

struct Limits {
  std::optional<double> least = {};
  std::optional<double> most = {};
  bool above_least = false;  // `least` itself is too small
};

struct Key {
  std::string path;                     // "training.batch_size"
  std::vector<std::string> kinds = {};  // of the section, to which it belongs; all when empty
  std::string description = {};
  std::vector<std::string> allowed = {};
  Limits limits = {};
  bool required = false;
  Value fallback = {};
  std::function<Value(const RunConfig&)> load = {};
  std::function<void(RunConfig&, const Value&)> store = {};

  std::string section() const { return path.substr(0, path.find('.')); }
  // After the section: "batch_size", "early_stopping.metric".
  std::string name() const { return path.substr(path.find('.') + 1); }
};

inline Limits at_least(double least) { return {.least = least}; }
inline Limits above(double least) { return {.least = least, .above_least = true}; }
inline Limits between(double least, double most) { return {.least = least, .most = most}; }

// Adds keys of one section, for some of its kinds.
class KeyList {
 public:
  explicit KeyList(std::vector<Key>& keys) : keys_(keys) {}

  void section(std::string name) {
    section_ = std::move(name);
    kinds_.clear();
  }
  // What follows belongs to these kinds of the section.
  void kinds(std::vector<std::string> names) { kinds_ = std::move(names); }

  // `member` gives the member of a RunConfig, const or not.
  template <class Member>
  Key& add(const std::string& name, Member member, std::string description, Limits limits = {}) {
    using T = std::decay_t<decltype(member(std::declval<RunConfig&>()))>;
    keys_.push_back(
        {.path = section_ + "." + name,
         .kinds = kinds_,
         .description = std::move(description),
         .limits = limits,
         .fallback = T(member(std::as_const(kDefaults))),
         .load = [member](const RunConfig& config) { return Value(member(config)); },
         .store = [member](RunConfig& config,
                           const Value& value) { member(config) = std::get<T>(value); }});
    return keys_.back();
  }
  // A text that is one of a few.
  template <class Member>
  Key& choice(const std::string& name, Member member, std::vector<std::string> allowed,
              std::string description) {
    Key& key = add(name, member, std::move(description));
    key.allowed = std::move(allowed);
    return key;
  }

 private:
  inline static const RunConfig kDefaults = {};

  std::vector<Key>& keys_;
  std::string section_;
  std::vector<std::string> kinds_;
};

void add_model_keys(KeyList& keys);
void add_data_keys(KeyList& keys);
void add_training_keys(KeyList& keys);  // optimizer, schedule and training
void add_parallel_keys(KeyList& keys);  // parallel and mixed_precision
void add_run_keys(KeyList& keys);       // checkpoint, logging and launch

}  // namespace lockstep::train

// A member of RunConfig, const or not, as KeyList::add() takes it.
#define LOCKSTEP_MEMBER(path) \
  [](auto& config) -> auto& { return config.path; }
