// All keys of a configuration, the program's own among them.
#pragma once

#include <string>
#include <vector>

#include "train/config/key.h"

namespace lockstep::train {

class Schema {
 public:
  // Throws ConfigError for extensions that have names twice, or names that are there already.
  explicit Schema(const ConfigExtensions& extensions);

  const std::vector<Key>& keys() const { return keys_; }
  // In the order in which they are shown.
  const std::vector<std::string>& sections() const { return sections_; }

  // The key of this path that belongs to the section's kind; null when there is none.
  const Key* find(const std::string& path, const std::string& kind) const;
  // All keys of this path: one, or several for different kinds.
  std::vector<const Key*> all(const std::string& path) const;
  // Whether keys have paths below this one: "parallel.fsdp".
  bool is_group(const std::string& path) const;
  bool is_section(const std::string& name) const;
  // "model.kind" where section `model` has kinds; empty where it has none.
  std::string kind_key(const std::string& section) const;

 private:
  void extend(const ConfigExtensions& extensions);
  void extend_kinds(const std::string& section,
                    const std::map<std::string, ConfigExtensions::Keys>& kinds);
  void declare(const std::string& section, const std::vector<std::string>& kinds,
               const KeyDeclaration& declared);

  std::vector<Key> keys_;
  std::vector<std::string> sections_;
};

// Whether the key holds for this kind of its section.
bool belongs_to(const Key& key, const std::string& kind);

// What a value of the key may be, in words: "one of sgd, adam", "a whole number, 1 or more".
std::string range_of(const Key& key);

// What is wrong with a value of the right type; empty when nothing is.
std::string fault_of(const Key& key, const Value& value);

}  // namespace lockstep::train
