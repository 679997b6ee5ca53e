#include "random/runs/plan.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace lockstep::test::runs {
namespace {

struct Choice {
  std::string name;
  std::vector<std::string> values;  // the first is taken half of the time
};

// What a run is. All starts have the same.
const std::vector<Choice>& run_choices() {
  static const std::vector<Choice> all = {
      {"ranks", {"2", "1", "2", "3", "4"}},
      // No batch of one sample, which BatchNorm refuses, on any number of ranks or lanes.
      {"samples", {"70", "94", "109"}},
      {"batch", {"8", "5", "7"}},
      {"model", {"net", "mlp"}},
      {"unused", {"no", "no", "yes"}},  // parameters that no batch uses, or some do
      {"accumulation", {"1", "2", "3"}},
      {"optimizer", {"adamw", "adam", "sgd", "rmsprop", "adagrad"}},
      {"groups", {"no", "yes"}},
      {"schedule", {"constant", "cosine", "linear", "one_cycle", "step", "plateau"}},
      {"warmup", {"no", "steps", "ratio"}},
      {"scaling", {"no", "sqrt"}},
      {"clip", {"no", "yes"}},
      {"precision", {"full", "bf16", "fp16"}},
      // Losses, or gradients of losses that are, which are not finite: such steps are skipped.
      {"bad", {"no", "all", "rank0", "gradients"}},
      {"loss", {"output", "batch"}},       // what it is a function of
      {"reduce", {"no", "no", "double"}},  // in which gradients are added up
      {"division", {"ddp", "zero", "share", "gather", "file", "gradients"}},
      {"replicas", {"no", "yes"}},  // an Fsdp's, of shards over half of the ranks
      {"hook", {"no", "no", "top_k", "power_sgd", "cast"}},
      {"sync_bn", {"no", "no", "yes", "pairs"}},
      {"buffers", {"broadcast", "average"}},
      {"lanes", {"no", "2", "3", "4"}},
      {"parts", {"no", "no", "no", "yes"}},  // a GAN's
      {"average", {"no", "ema", "swa", "every", "growing"}},
      {"tracked", {"no", "yes"}},  // what each rank has of its own, and a generator
      {"count", {"no", "yes"}},
      {"noise", {"no", "yes"}},
      {"loading", {"watched", "no"}},  // whether something may happen where batches are made
      {"shuffle", {"yes", "no"}},
      {"drop_last", {"no", "yes"}},
      {"length", {"epochs", "steps", "both", "stages", "stages_and_steps"}},
      {"evaluate_epochs", {"1", "0", "2"}},
      {"evaluate_steps", {"0", "3", "4"}},
      {"evaluate_batch", {"0", "3"}},
      {"held_out", {"31", "3", "17"}},
      {"early", {"no", "loss", "accuracy"}},
      {"patience", {"1", "0", "3"}},
      {"best", {"no", "loss", "accuracy"}},
      {"restore_best", {"no", "yes"}},
      {"ask_evaluation", {"no", "3", "5"}},  // every so many steps
      {"ask_save", {"no", "3", "4"}},
      {"ask_in", {"step_end", "evaluated", "epoch_end"}},
      {"stop_at", {"no", "no", "no", "5", "8"}},
  };
  return all;
}

// What may be another at each start.
const std::vector<Choice>& start_choices() {
  static const std::vector<Choice> all = {
      {"save_steps", {"0", "1", "2", "3", "5"}},
      {"save_epochs", {"1", "0"}},
      {"keep", {"0", "1", "2"}},
      {"async", {"yes", "no"}},
      {"workers", {"0", "2"}},
      {"prefetch", {"0", "3"}},
      {"log", {"1", "0", "3", "100"}},  // 0: no log
      {"tensorboard", {"no", "yes"}},
      {"progress", {"no", "yes"}},
      {"order", {"log_last", "log_first"}},  // of the callbacks
      {"at_end", {"yes", "no"}},
      {"from", {"latest", "folder"}},  // what it resumes from
      {"transport", {"auto", "tcp", "gloo", "hosts"}},
      {"buckets", {"no", "1", "300"}},
      {"check", {"no", "1", "3"}},  // that ranks are alike
      {"units", {"30", "1", "0"}},  // of so many parameters; 0: one
      {"ahead", {"no", "yes"}},     // units are gathered before they are called
      {"whole", {"no", "yes"}},     // units stay so until their backward
  };
  return all;
}

const std::vector<Choice>& interruption_choices() {
  static const std::vector<Choice> all = {
      {"how", {"no", "usr1", "term", "kill", "throw", "infinite", "time"}},
      {"at", {"step_end"}},
      {"step", {"0"}},
      {"rank", {"all"}},
      {"again", {"no", "yes"}},  // another signal follows
      {"restart", {"no", "yes"}}};
  return all;
}

const Choice& choice_of(const std::string& name) {
  for (const auto* all : {&run_choices(), &start_choices(), &interruption_choices()}) {
    for (const auto& choice : *all) {
      if (choice.name == name) return choice;
    }
  }
  throw std::invalid_argument("there is no setting " + name);
}

void draw(Dice& dice, const std::vector<Choice>& choices, int one_in, Settings& into) {
  for (const auto& choice : choices) {
    if (dice.one_in(one_in)) into.set(choice.name, dice.pick(choice.values));
  }
}

bool is_fsdp(const Settings& run) {
  return !run.is("division", "ddp") && !run.is("division", "zero");
}

// Drops what a Trainer refuses, or what is promised nothing for.
void settle(Settings& run) {
  const auto drop = [&](std::initializer_list<const char*> names) {
    for (const auto* name : names) run.drop(name);
  };
  if (run.has("parts")) drop({"lanes", "hook", "groups"});
  if (has_lanes(run)) {
    if (run.number("ranks") > run.number("lanes")) run.set("ranks", run["lanes"]);
    drop({"sync_bn", "hook", "buffers", "reduce", "tracked"});
    // The losses of one rank are another part of the samples on another number of ranks.
    if (run.is("bad", "rank0")) run.set("bad", "all");
  }
  if (run.is("sync_bn", "pairs") && run.number("ranks") % 2 > 0) drop({"sync_bn"});
  if (is_fsdp(run)) drop({"hook"});
  if (run.has("hook")) drop({"reduce"});
  // Nothing else looks at gradients.
  if (run.is("bad", "gradients") && run.is("precision", "full")) run.set("clip", "yes");
  if (run.is("bad", "gradients") && run.is("precision", "bf16")) run.set("clip", "yes");
  if (run.is("model", "mlp")) drop({"sync_bn", "buffers"});
  if (run.is("model", "mlp") && !run.has("parts")) drop({"unused"});
  if (run.has("parts")) drop({"loss"});
  if (run.is("schedule", "plateau")) drop({"warmup"});
  // It moves a momentum, which Adagrad has not.
  if (run.is("optimizer", "adagrad") && run.is("schedule", "one_cycle")) drop({"schedule"});
  if (!run.is("optimizer", "adamw")) drop({"groups"});
  if (!run.has("early")) drop({"patience"});
  // Which of several with one accuracy is the best, depends on what else was saved; so it does of
  // several with the loss of a part that some steps leave alone.
  if (!run.is("best", "loss") || run.has("parts")) drop({"restore_best"});
}

// Whether Ddp, ZeroOptimizer and Fsdp have the same bits.
bool may_change_division(const Settings& run) {
  return !run.has("hook") && !run.has("clip") && run.is("buffers", "broadcast") &&
         !run.has("parts") && !(run.has("reduce") && run.number("accumulation") > 1);
}

}  // namespace

Settings Settings::parse(const std::string& text) {
  Settings made;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const auto at = word.find('=');
    if (at == std::string::npos) throw std::invalid_argument(word + " has no value");
    made.set(word.substr(0, at), word.substr(at + 1));
  }
  return made;
}

std::string Settings::text() const {
  std::string all;
  for (const auto& [name, value] : given_) all += (all.empty() ? "" : " ") + name + "=" + value;
  return all;
}

const std::string& Settings::operator[](const std::string& name) const {
  const auto found = given_.find(name);
  return found != given_.end() ? found->second : choice_of(name).values.front();
}

void Settings::set(const std::string& name, const std::string& value) {
  (void)choice_of(name);
  given_[name] = value;
}

Settings Settings::with(const Settings& other) const {
  Settings made = *this;
  for (const auto& [name, value] : other.given_) made.set(name, value);
  return made;
}

std::string text_of(const Course& course) {
  std::string all;
  for (const auto& start : course) all += (all.empty() ? "" : " | ") + start.text();
  return all;
}

Course course_from(const std::string& text) {
  Course course;
  std::istringstream starts(text + " ");
  for (std::string start; std::getline(starts, start, '|');)
    course.push_back(Settings::parse(start));
  return course;
}

Settings drawn_run(Dice& dice) {
  Settings run;
  draw(dice, run_choices(), 2, run);
  draw(dice, start_choices(), 2, run);
  settle(run);
  return run;
}

Course drawn_course(Dice& dice, const Settings& run, const Places& places) {
  // A stop that was asked for is not in a checkpoint, unless a signal defers it: who kills such a
  // run may get one that goes on.
  const bool may_kill = !run.has("stop_at");
  // The evaluation at the end of its time may find another best.
  const bool may_end = may_kill && !run.has("restore_best");
  std::vector<std::string> names;
  for (const auto& [name, steps] : places) names.push_back(name);
  Course course;
  for (int64_t i = 0, count = 1 + dice.below(3); i <= count; ++i) {
    Settings start;
    draw(dice, start_choices(), 4, start);
    if (has_lanes(run)) {
      start.set("ranks", std::to_string(1 + dice.below(run.number("lanes"))));
    }
    if (may_change_division(run) && dice.one_in(3)) {
      start.set("division", dice.pick(choice_of("division").values));
      start.set("replicas", dice.pick(choice_of("replicas").values));
    }
    if (dice.one_in(2)) start.set("restart", "yes");
    if (i < count) {
      const auto& name = dice.pick(names);
      start.set("at", name);
      start.set("step", std::to_string(dice.pick(places.at(name))));
      const int64_t how = dice.below(may_end ? 10 : may_kill ? 8 : 4);
      start.set("how", how < 3   ? "usr1"
                       : how < 4 ? "term"
                       : how < 7 ? "kill"
                       : how < 8 ? "throw"
                                 : "time");
      if (may_kill && name == "loss" && !run.has("bad") && dice.one_in(2)) {
        start.set("how", "infinite");
      }
      if (dice.one_in(2)) {
        start.set("rank", std::to_string(dice.below(run.with(start).number("ranks"))));
      }
      if ((start.is("how", "usr1") || start.is("how", "term")) && dice.one_in(3)) {
        start.set("again", "yes");
      }
    }
    // A norm is added up by units.
    if (run.has("clip")) start.drop("units");
    course.push_back(start);
  }
  // Later places later: an earlier one would not be come to again.
  for (size_t i = 0; i + 2 < course.size(); ++i) {
    for (size_t j = i + 1; j + 1 < course.size(); ++j) {
      if (course[j].number("step") < course[i].number("step")) std::swap(course[i], course[j]);
    }
  }
  return course;
}

bool is_failure(const Settings& start) {
  return start.is("how", "kill") || start.is("how", "throw") || start.is("how", "infinite");
}

std::vector<std::pair<Settings, Course>> smaller(const Settings& run, const Course& course) {
  std::vector<std::pair<Settings, Course>> all;
  for (size_t i = 0; i + 1 < course.size(); ++i) {
    Course fewer = course;
    fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
    all.emplace_back(run, fewer);
  }
  for (const auto& [name, value] : run.given()) {
    Settings simpler = run;
    simpler.drop(name);
    settle(simpler);
    all.emplace_back(simpler, course);
  }
  for (size_t i = 0; i < course.size(); ++i) {
    for (const auto& [name, value] : course[i].given()) {
      if (name == "how" || name == "at" || name == "step") continue;
      Course simpler = course;
      simpler[i].drop(name);
      all.emplace_back(run, simpler);
    }
  }
  return all;
}

}  // namespace lockstep::test::runs
