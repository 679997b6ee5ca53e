#include "random/changes/course.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace lockstep::test::changes {
namespace {

const std::vector<std::string> kKinds{"ddp", "zero", "shared_zero", "fsdp", "local"};
const std::vector<std::string> kWhats{"freeze",     "thaw",     "rate",   "add_group",
                                      "drop_group", "replace",  "tie",    "tie_weight",
                                      "skip",       "overflow", "refresh"};
const std::vector<std::string> kHooks{"", "float", "half", "bfloat", "top_k", "power_sgd"};
const std::vector<std::string> kOptimizers{"sgd",       "adam",        "adamw",
                                           "fused_sgd", "fused_adamw", "rmsprop"};

bool is_zero(Kind kind) { return kind == Kind::Zero || kind == Kind::SharedZero; }

size_t phase_of(const Course& course, int step) {
  size_t phase = 0;
  while (step >= course.begin(phase) + course.phases[phase].steps) ++phase;
  return phase;
}

// Each model has a gradient, or a Join of both would miss a backward().
bool is_kept(const Course& course, int block) { return course.models > 1 && block == kBlocks / 2; }

Change drawn_change(Dice& dice, const Course& course) {
  Change change{.step = static_cast<int>(dice.below(course.steps()))};
  const std::vector<What> all{What::Freeze,    What::Freeze,   What::Thaw,     What::Thaw,
                              What::Rate,      What::Replace,  What::Tie,      What::Skip,
                              What::Skip,      What::Refresh,  What::Overflow, What::AddGroup,
                              What::TieWeight, What::DropGroup};
  change.what = dice.pick(all);
  // Block 0 always has a gradient.
  change.block = static_cast<int>(1 + dice.below(kBlocks - 1));
  change.other = static_cast<int>(dice.below(kBlocks));
  if (change.other == change.block) change.other = 0;
  // No layer in both models.
  if (course.models > 1) change.other = change.block ^ 1;
  change.told = !dice.one_in(4);
  if (change.what == What::Thaw && !course.frozen.empty()) change.block = dice.pick(course.frozen);
  const bool zero = is_zero(course.phases[phase_of(course, change.step)].kind);
  // Of two optimizers one may make a step in which the other's gradients overflow.
  change.anew = zero ? course.optimizers > 1 || !dice.one_in(8) : dice.one_in(3);
  if (change.what == What::Overflow && !course.scaled) change.what = What::Rate;
  const bool stops = change.what == What::Freeze || change.what == What::Skip;
  if (stops && is_kept(course, change.block)) change.what = What::Refresh;
  const bool is_light =
      change.what == What::Freeze || change.what == What::Thaw || change.what == What::Skip;
  if (course.micros > 1 && is_light && dice.one_in(2)) {
    change.part = static_cast<int>(1 + dice.below(course.micros - 1));
  }
  // What was frozen may not be unfrozen there without refresh(), and all lanes of an Fsdp call the
  // same units.
  const bool is_fsdp = course.phases[phase_of(course, change.step)].kind == Kind::Fsdp;
  if (course.lanes > 0 && !is_fsdp && is_light && change.what != What::Thaw && dice.one_in(2)) {
    change.part = static_cast<int>(1 + dice.below(course.lanes - 1));
  }
  return change;
}

// How many batches of `most` each rank has; one has all.
std::vector<int> drawn_joined(Dice& dice, size_t ranks, int most) {
  std::vector<int> counts;
  for (size_t rank = 0; rank < ranks; ++rank) {
    counts.push_back(static_cast<int>(dice.below(most + 1)));
  }
  counts[static_cast<size_t>(dice.below(static_cast<int64_t>(ranks)))] = most;
  return counts;
}

Phase drawn_phase(Dice& dice, const Course& course, const std::vector<int>& ranks) {
  std::vector<Kind> kinds{Kind::Ddp,        Kind::Ddp,  Kind::Zero,
                          Kind::SharedZero, Kind::Fsdp, Kind::Fsdp};
  if (course.lanes == 0 && !course.normalized && !course.average) kinds.push_back(Kind::Local);
  // What a hook keeps is seen in phases that have one, on other numbers of ranks, too.
  if (course.feedback && !dice.one_in(4)) kinds = {Kind::Ddp, Kind::Zero, Kind::SharedZero};
  Phase phase{.kind = dice.pick(kinds),
              .ranks = ranks,
              .steps = static_cast<int>(1 + dice.below(4)),
              .optimizer = dice.pick(kOptimizers),
              .async = dice.one_in(2),
              .seed = dice.next() % 1000};
  const bool joins = phase.kind != Kind::Fsdp && phase.kind != Kind::Local && course.lanes == 0;
  if (joins && dice.one_in(3)) {
    phase.joined = drawn_joined(dice, ranks.size(), static_cast<int>(1 + dice.below(phase.steps)));
    phase.divides_by_active = dice.one_in(2);
    // SyncBatchNorm needs all ranks.
    if (course.normalized) std::ranges::fill(phase.joined, std::ranges::max(phase.joined));
  }
  if (phase.kind != Kind::Local && dice.one_in(4))
    phase.discarded = static_cast<int>(1 + dice.below(2));
  phase.narrow = phase.kind == Kind::Fsdp && !course.normalized && dice.one_in(6);
  if (phase.kind == Kind::Local && dice.one_in(2)) {
    phase.local_from = static_cast<int>(dice.below(3));
    phase.in_pairs = dice.one_in(3);
  }
  const bool may_reduce =
      course.lanes == 0 && phase.kind != Kind::Local &&
      (course.hook == Hook::None || (phase.kind == Kind::Fsdp && course.hook != Hook::TopK));
  phase.reduced = may_reduce && dice.one_in(5);
  return phase;
}

Course drawn_course(Dice& dice, uint64_t seed, const std::vector<std::vector<int>>& ranks) {
  Course course{.seed = seed};
  course.lanes = dice.one_in(2) ? dice.pick(std::vector{4, 6, 8, 12}) : 0;
  course.micros = course.lanes == 0 && dice.one_in(3) ? static_cast<int>(2 + dice.below(2)) : 1;
  course.scaled = dice.one_in(3);
  if (dice.one_in(4)) {
    course.average = dice.pick(std::vector{0.7, 1.0});
    course.average_from = static_cast<int>(dice.below(3));
    course.average_every = static_cast<int>(1 + dice.below(3));
  }
  course.clip = dice.pick(
      std::vector{Course::Clip::None, Course::Clip::None, Course::Clip::Norm, Course::Clip::Value});
  if (course.lanes == 0) {
    course.normalized = dice.one_in(5);
    course.drops = dice.one_in(3);
    if (dice.one_in(2)) {
      course.hook = static_cast<Hook>(1 + dice.below(std::ssize(kHooks) - 1));
      course.feedback = !dice.one_in(4);
    }
  }
  course.buffers = dice.pick(std::vector{Shared::FirstRanks, Shared::Average, Shared::None});
  // Lanes have none of their own.
  if (course.lanes > 0 && course.buffers == Shared::None) course.buffers = Shared::Average;
  course.is_strict = dice.one_in(6);
  course.gamma = dice.one_in(3) ? 0.8 : 1;
  course.optimizers = dice.one_in(4) ? 2 : 1;
  course.models = dice.one_in(4) ? 2 : 1;
  course.clears_first = dice.one_in(2);
  course.clear = dice.pick(std::vector{Clear::Wrapper, Clear::Optimizer, Clear::Zeros});
  for (int block = 1; block < kBlocks; ++block) {
    if (dice.one_in(4) && block >= course.optimizers) course.late.push_back(block);
    if (dice.one_in(4) && !is_kept(course, block)) course.frozen.push_back(block);
  }
  for (const auto& some : ranks) course.phases.push_back(drawn_phase(dice, course, some));
  if (!dice.one_in(4)) {
    for (auto& phase : course.phases) phase.optimizer = course.phases[0].optimizer;
  }
  // It refuses lanes and shards, and one copy for all ranks is not to be written by each.
  const bool can_average = std::ranges::all_of(course.phases, [](const Phase& phase) {
    return phase.kind == Kind::Ddp || phase.kind == Kind::Zero;
  });
  course.synchronized = dice.one_in(2) && can_average && course.lanes == 0;
  for (auto count = dice.below(6); count > 0; --count) {
    course.changes.push_back(drawn_change(dice, course));
  }
  // What a hook keeps for a block stays while no rank uses it.
  if (course.feedback && course.steps() > 2 && dice.one_in(2)) {
    const int step = static_cast<int>(1 + dice.below(course.steps() - 2));
    int block = static_cast<int>(1 + dice.below(kBlocks - 1));
    if (is_kept(course, block)) block = 1;
    for (const int at : {step, step + 1}) {
      course.changes.push_back({.step = at, .what = What::Skip, .block = block});
    }
  }
  // All ranks make them, and within a Join some have ended.
  std::erase_if(course.changes, [&](const Change& change) {
    const size_t phase = phase_of(course, change.step);
    const int first = course.first_joined(phase);
    return change.step > first || (change.step == first && change.part > 0);
  });
  std::ranges::stable_sort(
      course.changes, {}, [](const Change& change) { return std::pair(change.step, change.part); });
  return course;
}

std::vector<int> hosts_of(Dice& dice, int ranks) {
  std::vector<int> hosts;
  const bool in_turn = dice.one_in(2);
  for (int rank = 0; rank < ranks; ++rank) {
    hosts.push_back(in_turn ? rank % 2 : rank * 2 / ranks);
  }
  return hosts;
}

}  // namespace

int Course::begin(size_t phase) const {
  int steps = 0;
  for (size_t i = 0; i < phase; ++i) steps += phases[i].steps;
  return steps;
}

int Course::steps() const { return begin(phases.size()); }

bool Course::has(Kind kind) const { return std::ranges::count(phases, kind, &Phase::kind) > 0; }

bool Course::is_fresh(size_t phase) const {
  if (phase == 0) return true;
  const Phase &now = phases[phase], &before = phases[phase - 1];
  return now.kind == Kind::Local || before.kind == Kind::Local ||
         family_of(now.optimizer) != family_of(before.optimizer);
}

bool Course::has_hook(size_t phase) const {
  return hook != Hook::None && phases[phase].kind != Kind::Fsdp &&
         phases[phase].kind != Kind::Local;
}

bool Course::has_ddp(size_t phase) const {
  const Phase& own = phases[phase];
  return own.kind != Kind::Fsdp && (own.kind != Kind::Local || own.local_from >= 0);
}

int Course::first_joined(size_t phase) const {
  const auto& joined = phases[phase].joined;
  return begin(phase + 1) - (joined.empty() ? 0 : *std::ranges::max_element(joined));
}

std::string family_of(const std::string& optimizer) {
  return optimizer.starts_with("fused_") ? optimizer.substr(6) : optimizer;
}

std::string Course::text() const {
  std::string text =
      fmt::format("lanes={} micros={} clear={} clip={} late={} frozen={}", lanes, micros,
                  static_cast<int>(clear), static_cast<int>(clip), late, frozen);
  if (hook != Hook::None) text += " hook=" + kHooks[static_cast<size_t>(hook)];
  if (average) {
    text += fmt::format(" average={} from {} every {}", *average, average_from, average_every);
  }
  if (gamma != 1) text += fmt::format(" gamma={}", gamma);
  if (optimizers > 1) text += " two optimizers";
  if (models > 1) text += " two models";
  text += fmt::format(" buffers={}", static_cast<int>(buffers));
  const std::vector<std::pair<bool, const char*>> flags{
      {feedback, "feedback"}, {normalized, "normalized"},     {drops, "drops"},
      {scaled, "scaled"},     {clears_first, "clears_first"}, {synchronized, "synchronized"},
      {is_strict, "strict"}};
  for (const auto& [is_set, name] : flags) {
    if (is_set) text += fmt::format(" {}", name);
  }
  for (const auto& phase : phases) {
    text += fmt::format("\n    {} {} on {} {} steps{}{}", kKinds[static_cast<size_t>(phase.kind)],
                        phase.optimizer, phase.ranks, phase.steps, phase.async ? " async" : "",
                        phase.narrow ? " narrow" : "");
    if (phase.reduced) text += " reduced";
    if (phase.local_from >= 0) {
      text += fmt::format(" local_from={}{}", phase.local_from, phase.in_pairs ? " in pairs" : "");
    }
    if (!phase.joined.empty()) {
      text += fmt::format(" joined={}{}", phase.joined, phase.divides_by_active ? " active" : "");
    }
    if (phase.discarded > 0) text += fmt::format(" and {} discarded", phase.discarded);
    text += fmt::format(" ({})", phase.seed);
  }
  for (const auto& change : changes) {
    text += fmt::format("\n    before step {}{}: {} {} {}{}{}", change.step,
                        change.part > 0 ? fmt::format("'s part {}", change.part) : "",
                        kWhats[static_cast<size_t>(change.what)], change.block, change.other,
                        change.told ? "" : " untold", change.anew ? " anew" : "");
  }
  return text;
}

std::string Program::text() const {
  std::string text = fmt::format("seed {}: {} ranks, {} {}", seed, ranks, backend, hosts);
  for (const auto& course : courses) text += "\n  " + course.text();
  return text;
}

Program drawn(uint64_t seed, const std::string& backend, int ranks,
              const std::vector<int>& without) {
  Dice dice(mixed(seed, 1));
  Program program{.seed = seed};
  program.ranks = dice.pick(std::vector{1, 2, 2, 3, 3, 4, 4});
  if (ranks > 0) program.ranks = ranks;
  program.backend =
      dice.pick(std::vector<std::string>{"shm", "shm", "tcp", "gloo", "host-then-net"});
  if (!backend.empty()) program.backend = backend;
  if (program.ranks == 1) program.backend = "auto";
  if (program.backend == "host-then-net") {
    if (program.ranks == 2) {
      program.backend = "tcp";
    } else {
      program.hosts = hosts_of(dice, program.ranks);
    }
  }
  // Each phase's ranks are divided anew.
  const size_t courses = program.ranks > 1 && dice.one_in(3) ? 2 : 1;
  std::vector<std::vector<std::vector<int>>> places(courses);
  for (auto phases = 1 + dice.below(3); phases > 0; --phases) {
    std::vector<int> all;
    for (int rank = 0; rank < program.ranks; ++rank) all.push_back(rank);
    dice.shuffle(all);
    const auto least = static_cast<int64_t>(courses) - 1;
    const auto first =
        dice.one_in(2) ? program.ranks - least : 1 + dice.below(program.ranks - least);
    std::vector<std::vector<int>> some{{all.begin(), all.begin() + first}};
    some.emplace_back(all.begin() + first, all.end());
    for (size_t i = 0; i < courses; ++i) {
      std::ranges::sort(some[i]);
      places[i].push_back(some[i]);
    }
  }
  int number = 0;
  for (size_t i = 0; i < courses; ++i) {
    program.courses.push_back(drawn_course(dice, mixed(seed, 2 + i), places[i]));
    std::erase_if(program.courses.back().changes,
                  [&](const Change&) { return std::ranges::count(without, number++) > 0; });
  }
  return program;
}

}  // namespace lockstep::test::changes
