// What a run is, and what happens to it on the way, as texts: "name=value name=value".
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "random/common/dice.h"

namespace lockstep::test::runs {

// Values by name. What is not given has the first of its choices (plan.cpp).
class Settings {
 public:
  static Settings parse(const std::string& text);
  std::string text() const;

  const std::string& operator[](const std::string& name) const;
  int64_t number(const std::string& name) const { return std::stoll((*this)[name]); }
  bool is(const std::string& name, const std::string& value) const {
    return (*this)[name] == value;
  }
  bool has(const std::string& name) const { return (*this)[name] != "no"; }
  void set(const std::string& name, const std::string& value);
  void drop(const std::string& name) { given_.erase(name); }
  // Those of `other` in place of its own.
  Settings with(const Settings& other) const;
  const std::map<std::string, std::string>& given() const { return given_; }

 private:
  std::map<std::string, std::string> given_;
};

// Each start of a run's processes: how many ranks, which settings are others there, and what
// happens to them: `how` at the point `at` after step `step` (of "file": at that call of the file
// system; of "loading": at that batch), on rank `rank` or on all.
using Course = std::vector<Settings>;
std::string text_of(const Course& course);
Course course_from(const std::string& text);

// Where something can happen: a name, and the step (of "file" and "loading": how many there were).
using Places = std::map<std::string, std::vector<int64_t>>;

// Options that go together, and the number of ranks.
Settings drawn_run(Dice& dice);
// Whether ranks train the same bits on any number of them.
inline bool has_lanes(const Settings& run) { return run.has("lanes"); }
// One to three interruptions of a run that comes to these places, and a last start without.
Course drawn_course(Dice& dice, const Settings& run, const Places& places);
// Whether its interruption leaves no time to save.
bool is_failure(const Settings& start);

// Smaller runs and courses, to be tried in this order.
std::vector<std::pair<Settings, Course>> smaller(const Settings& run, const Course& course);

}  // namespace lockstep::test::runs
