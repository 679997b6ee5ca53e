// Everything that is wrong with a configuration, collected so that it is told at once.
#pragma once

#include <string>
#include <vector>

namespace lockstep::train {

// Where a value, or what stands for one, was written: the beginning of an error about it.
struct Origin {
  std::string text = {};  // "run.yaml:12:3", "--set training.seed=x", "environment NAME"
  int order = 0;          // errors are told in this order: lines of the file, then what came later
};

class Problems {
 public:
  void add(const Origin& origin, const std::string& what) { found_.push_back({origin, what}); }
  bool empty() const { return found_.empty(); }
  // Throws ConfigError that lists them all; `name` is the file's. Nothing when there are none.
  void raise(const std::string& name);

 private:
  struct Problem {
    Origin origin;
    std::string what;
  };
  std::vector<Problem> found_;
};

}  // namespace lockstep::train
