// Values as they were written, wherever that was, before they are checked.
#pragma once

#include <yaml-cpp/yaml.h>

#include <string>
#include <vector>

#include "lockstep/train/config_source.h"
#include "train/config/problems.h"

namespace lockstep::train {

class Schema;

struct Setting {
  std::string path;     // "training.batch_size"
  YAML::Node node;      // its value
  Origin origin;        // of the key
  Origin value_origin;  // of the value, which may stand in another line
  std::string written;  // as the key is called there: "batch_size"
  int layer = 0;        // a later layer overrides an earlier one: file, environment, command line
};

// The keys whose last part is `name`: training.epochs for "epochs". Where there are none, those
// that the flat key of this name sets: optimizer.learning_rate for "lr".
std::vector<std::string> keys_called(const Schema& schema, const std::string& name);

// The settings of all sources (file, environment, command line), key by key.
class Settings {
 public:
  Settings(const Schema& schema, Problems& problems, std::vector<std::string>& remarks)
      : schema_(schema), problems_(problems), remarks_(remarks) {}

  // A whole file. Faults of YAML itself are problems, too, and so is a file with nothing in it;
  // a text of a program's may be empty.
  enum class Empty { Problem, Defaults };
  void read_file(const std::string& text, const std::string& name, Empty empty);
  // Variables of this process.
  void read_environment();
  // "section.key=value".
  void read_override(const std::string& text);
  // Whether a flag goes before what overrides the file.
  static bool overrides(const LaunchFlag& flag);
  // After all others, or, if overrides() says no, after the environment.
  void read_flag(const LaunchFlag& flag);

  const std::vector<Setting>& list() const { return settings_; }

 private:
  void read_top(const YAML::Node& key, const YAML::Node& value, const Origin& origin);
  void read_group(const YAML::Node& map, const std::string& path, const Origin& whole);
  // Any key below the root: `written` is its path, or a flat name.
  void read_key(const std::string& path, const YAML::Node& value, const Origin& origin);
  void add(const std::string& path, const YAML::Node& value, const Origin& origin,
           const std::string& written);
  void refuse_unknown(const std::string& last, const std::string& path, const Origin& origin);
  Origin at(const YAML::Node& node, const Origin& otherwise) const;

  const Schema& schema_;
  Problems& problems_;
  std::vector<std::string>& remarks_;
  std::vector<Setting> settings_;
  std::string file_;
  int layer_ = 0;
  int order_ = 0;  // of what is not in the file
};

}  // namespace lockstep::train
