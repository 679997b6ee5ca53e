#include "random/changes/course.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

namespace lockstep::test::changes {
namespace {

const std::vector<std::string> kKinds{"ddp", "zero", "shared_zero", "fsdp"};
const std::vector<std::string> kWhats{"freeze", "thaw", "rate",     "add_group", "replace",
                                      "tie",    "skip", "overflow", "refresh"};
const std::vector<std::string> kOptimizers{"sgd", "adam", "adamw", "fused_sgd", "fused_adamw"};

bool is_zero(Kind kind) { return kind == Kind::Zero || kind == Kind::SharedZero; }

bool is_structural(What what) {
  return what == What::Replace || what == What::Tie || what == What::AddGroup;
}

size_t phase_of(const Course& course, int step) {
  size_t phase = 0;
  while (step >= course.begin(phase) + course.phases[phase].steps) ++phase;
  return phase;
}

Change drawn_change(Dice& dice, const Course& course) {
  Change change{.step = static_cast<int>(dice.below(course.steps()))};
  const std::vector<What> all{What::Freeze, What::Freeze,  What::Thaw,     What::Thaw,
                              What::Rate,   What::Replace, What::Tie,      What::Skip,
                              What::Skip,   What::Refresh, What::Overflow, What::AddGroup};
  change.what = dice.pick(all);
  // Block 0 always has a gradient.
  change.block = static_cast<int>(1 + dice.below(kBlocks - 1));
  change.other = static_cast<int>(dice.below(kBlocks));
  if (change.other == change.block) change.other = 0;
  change.told = !dice.one_in(4);
  if (change.what == What::Thaw && !course.frozen.empty()) change.block = dice.pick(course.frozen);
  const bool zero = is_zero(course.phases[phase_of(course, change.step)].kind);
  change.anew = zero ? !dice.one_in(8) : dice.one_in(3);
  if (change.what == What::Overflow && !course.scaled) change.what = What::Rate;
  return change;
}

Course drawn_course(Dice& dice, uint64_t seed, const std::vector<std::vector<int>>& ranks) {
  Course course{.seed = seed};
  course.optimizer = dice.pick(kOptimizers);
  course.lanes = dice.one_in(2) ? dice.pick(std::vector{4, 6, 8}) : 0;
  course.micros = course.lanes == 0 && dice.one_in(3) ? 2 : 1;
  course.scaled = dice.one_in(3);
  course.averaged = dice.one_in(4);
  course.clipped = dice.one_in(4);
  course.clears_first = dice.one_in(2);
  course.clear = dice.pick(std::vector{Clear::Wrapper, Clear::Optimizer, Clear::Zeros});
  for (int block = 1; block < kBlocks; ++block) {
    if (dice.one_in(4)) course.late.push_back(block);
    if (dice.one_in(4)) course.frozen.push_back(block);
  }
  const std::vector<Kind> kinds{Kind::Ddp,        Kind::Ddp,  Kind::Zero,
                                Kind::SharedZero, Kind::Fsdp, Kind::Fsdp};
  for (const auto& some : ranks) {
    course.phases.push_back({.kind = dice.pick(kinds),
                             .ranks = some,
                             .steps = static_cast<int>(1 + dice.below(4)),
                             .async = dice.one_in(2),
                             .seed = dice.next() % 1000});
  }
  // It refuses lanes and shards, and one copy for all ranks is not to be written by each.
  const bool can_average = std::ranges::all_of(course.phases, [](const Phase& phase) {
    return phase.kind == Kind::Ddp || phase.kind == Kind::Zero;
  });
  course.synchronized = dice.one_in(2) && can_average && course.lanes == 0;
  for (auto count = dice.below(6); count > 0; --count) {
    course.changes.push_back(drawn_change(dice, course));
  }
  std::ranges::stable_sort(course.changes, {}, &Change::step);
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

std::string Course::text() const {
  std::string text =
      fmt::format("{} lanes={} micros={} clear={}{}{}{}{}{} late={} frozen={}", optimizer, lanes,
                  micros, static_cast<int>(clear), clears_first ? " clears_first" : "",
                  scaled ? " scaled" : "", averaged ? " averaged" : "",
                  synchronized ? " synchronized" : "", clipped ? " clipped" : "", late, frozen);
  for (const auto& phase : phases) {
    text += fmt::format("\n    {} on {} {} steps{} ({})", kKinds[static_cast<size_t>(phase.kind)],
                        phase.ranks, phase.steps, phase.async ? " async" : "", phase.seed);
  }
  for (const auto& change : changes) {
    text += fmt::format("\n    before step {}: {} {} {}{}{}", change.step,
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

namespace {

const std::vector<int> kAll{0, 1, 2, 3};
static_assert(kBlocks == 4);

// Which layers there are, by number, and what is known of them.
struct Layers {
  std::vector<int> up, down;
  std::set<int> frozen;
  int count = 2 * kBlocks;

  explicit Layers(const Course& course) {
    for (int block = 0; block < kBlocks; ++block)
      up.push_back(2 * block), down.push_back(2 * block + 1);
    for (const int block : course.frozen) set_trainable(block, false);
  }
  void set_trainable(int block, bool trainable) {
    for (const int layer : {up[static_cast<size_t>(block)], down[static_cast<size_t>(block)]}) {
      trainable ? static_cast<void>(frozen.erase(layer)) : static_cast<void>(frozen.insert(layer));
    }
  }
  void take(const Change& change) {
    if (change.what == What::Freeze) set_trainable(change.block, false);
    if (change.what == What::Thaw) set_trainable(change.block, true);
    int& own = up[static_cast<size_t>(change.block)];
    if (change.what == What::Replace) own = count++;
    if (change.what == What::Tie) own = up[static_cast<size_t>(change.other)];
  }
  // The layers `up` of `blocks`, each under its first name, as parameters are listed.
  std::map<int, int> first(const std::vector<int>& blocks) const {
    std::map<int, int> names, layers;
    for (const int block : blocks) {
      const int layer = up[static_cast<size_t>(block)];
      if (names.try_emplace(layer, block).second) layers[block] = layer;
    }
    return layers;
  }
  // Whether what was attached to `before` is right for this.
  bool fits(const Layers& before) const {
    return first(kAll) == before.first(kAll) && std::ranges::includes(frozen, before.frozen);
  }
};

}  // namespace

std::string refusal_of(const Course& course, size_t number) {
  const Phase& phase = course.phases[number];
  const int begin = course.begin(number), end = begin + phase.steps;
  const bool is_fsdp = phase.kind == Kind::Fsdp;
  const bool is_attached = phase.ranks.size() > 1 || course.lanes > 0 || is_fsdp;
  Layers layers(course);
  std::vector<int> blocks;
  for (int block = 0; block < kBlocks; ++block) {
    if (std::ranges::count(course.late, block) == 0) blocks.push_back(block);
  }
  size_t next = 0;
  const auto take = [&](const Change& change) {
    layers.take(change);
    if (change.what == What::AddGroup && std::ranges::count(blocks, change.block) == 0) {
      blocks.push_back(change.block);
    }
  };
  for (; next < course.changes.size() && course.changes[next].step < begin; ++next) {
    take(course.changes[next]);
  }
  Layers attached = layers;
  auto sharded = layers.first(blocks);
  for (int step = begin; step < end; ++step) {
    bool overflows = false;
    for (; next < course.changes.size() && course.changes[next].step == step; ++next) {
      const Change& change = course.changes[next];
      take(change);
      overflows = overflows || change.what == What::Overflow;
      if (change.what == What::Refresh ||
          (change.told && (change.what == What::Thaw || change.what == What::Replace ||
                           change.what == What::Tie))) {
        if (!is_fsdp) attached = layers;
      }
      if (is_structural(change.what) && change.anew) sharded = layers.first(blocks);
    }
    if (is_attached && !layers.fits(attached))
      return is_fsdp ? "after Fsdp was attached: construct it again" : "call ddp.refresh()";
    if (is_zero(phase.kind) && !overflows && layers.first(blocks) != sharded) {
      return "construct another ZeroOptimizer when parameters are added or replaced";
    }
  }
  return {};
}

}  // namespace lockstep::test::changes
