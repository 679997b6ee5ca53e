// What is refused, found from the course alone.
#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <span>

#include "lockstep/core/shard.h"
#include "random/changes/course.h"

namespace lockstep::test::changes {
namespace {

const std::vector<int> kAll{0, 1, 2, 3};
static_assert(kBlocks == 4);

bool is_structural(What what) {
  return what == What::Replace || what == What::Tie || what == What::TieWeight ||
         what == What::AddGroup || what == What::DropGroup;
}

// Which parameters there are, by number, and what is known of them.
struct Parameters {
  // Of a block: the weight of `up`, its bias, and both of `down`.
  std::vector<std::array<int, 3>> of;
  std::set<int> frozen;
  std::set<int> skipped;  // blocks
  int count = 0;

  explicit Parameters(const Course& course) {
    for (int block = 0; block < kBlocks; ++block) {
      of.push_back({count, count + 1, count + 2});
      count += 3;
    }
    for (const int block : course.frozen) set_trainable(block, false);
  }
  void set_trainable(int block, bool trainable) {
    for (const int each : of[static_cast<size_t>(block)]) {
      trainable ? static_cast<void>(frozen.erase(each)) : static_cast<void>(frozen.insert(each));
    }
  }
  void take(const Change& change) {
    if (change.what == What::Freeze) set_trainable(change.block, false);
    if (change.what == What::Thaw) set_trainable(change.block, true);
    if (change.what == What::Skip && !skipped.erase(change.block)) skipped.insert(change.block);
    auto& own = of[static_cast<size_t>(change.block)];
    const auto& other = of[static_cast<size_t>(change.other)];
    if (change.what == What::Replace) own[0] = count++, own[1] = count++;
    if (change.what == What::Tie) own[0] = other[0], own[1] = other[1];
    if (change.what != What::TieWeight) return;
    // Of the layer, which several blocks may have.
    const int bias = own[1], weight = other[0];
    for (auto& block : of) {
      if (block[1] == bias) block[0] = weight;
    }
  }
  // Those of `blocks`, each under its first name, as parameters are listed.
  std::map<std::pair<int, size_t>, int> first(const std::vector<int>& blocks) const {
    std::set<int> seen;
    std::map<std::pair<int, size_t>, int> named;
    for (const int block : blocks) {
      for (size_t i = 0; i < 3; ++i) {
        const int each = of[static_cast<size_t>(block)][i];
        if (seen.insert(each).second) named[{block, i}] = each;
      }
    }
    return named;
  }
  // Those that a backward gives gradients.
  std::set<int> reached() const {
    std::set<int> all;
    for (int block = 0; block < kBlocks; ++block) {
      if (skipped.contains(block)) continue;
      for (const int each : of[static_cast<size_t>(block)]) {
        if (!frozen.contains(each)) all.insert(each);
      }
    }
    return all;
  }
  // Whether what was attached to `before` is right for this.
  bool fits(const Parameters& before) const {
    return first(kAll) == before.first(kAll) && std::ranges::includes(frozen, before.frozen);
  }
};

// Whether a rank's lanes have not reached a parameter that is frozen after them, and other lanes
// have.
bool is_frozen_on_some(const std::vector<Parameters>& lanes, int ranks) {
  std::set<int> used;
  for (const auto& lane : lanes) used.merge(lane.reached());
  for (int rank = 0; rank < ranks; ++rank) {
    const auto own = Shard{rank, ranks}.of(std::ssize(lanes));
    std::set<int> reached;
    for (auto lane = own.begin; lane < own.end; ++lane) {
      reached.merge(lanes[static_cast<size_t>(lane)].reached());
    }
    const auto& frozen = lanes[static_cast<size_t>(own.end - 1)].frozen;
    const bool lacks_one = std::ranges::any_of(
        used, [&](int each) { return !reached.contains(each) && frozen.contains(each); });
    if (lacks_one) return true;
  }
  return false;
}

// Whether some rank of a Ddp that was attached to `attached` has a parameter without a gradient.
// `parts`: as each lane, or micro-batch, finds the parameters.
bool lacks_gradients(const Parameters& attached, const std::vector<Parameters>& parts, int ranks,
                     bool are_lanes) {
  const auto lacks = [&](std::span<const Parameters> own, bool in_each) {
    std::map<int, int> counts;
    for (const auto& part : own) {
      for (const int each : part.reached()) ++counts[each];
    }
    for (const auto& [place, each] : attached.first(kAll)) {
      if (attached.frozen.contains(each) || own.back().frozen.contains(each)) continue;
      if (counts[each] < (in_each ? std::ssize(own) : 1)) return true;
    }
    return false;
  };
  const std::span<const Parameters> all(parts);
  if (!are_lanes) return lacks(all, /*in_each=*/false);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto own = Shard{rank, ranks}.of(std::ssize(parts));
    if (lacks(all.subspan(static_cast<size_t>(own.begin), static_cast<size_t>(own.end - own.begin)),
              /*in_each=*/true))
      return true;
  }
  return false;
}

}  // namespace

std::string refusal_of(const Course& course, size_t number) {
  const Phase& phase = course.phases[number];
  const int begin = course.begin(number), end = begin + phase.steps;
  if (phase.kind == Kind::Local && !course.has_ddp(number)) return {};
  const bool is_fsdp = phase.kind == Kind::Fsdp;
  const bool is_zero = phase.kind == Kind::Zero || phase.kind == Kind::SharedZero;
  const bool is_attached = phase.ranks.size() > 1 || course.lanes > 0 || is_fsdp;
  const bool is_strict = course.is_strict && is_attached && !is_fsdp;
  const int ranks = static_cast<int>(phase.ranks.size());
  const int part_count = std::max(course.lanes, course.micros);
  const std::string no_gradient = "parameters got no gradient in backward()";
  Parameters now(course);
  std::vector<int> blocks, added;
  for (int block = 0; block < kBlocks; ++block) {
    if (std::ranges::count(course.late, block) == 0) blocks.push_back(block);
  }
  size_t next = 0;
  const auto take = [&](const Change& change) {
    now.take(change);
    if (change.what == What::AddGroup && std::ranges::count(blocks, change.block) == 0) {
      blocks.push_back(change.block);
      added.push_back(change.block);
    }
    if (change.what == What::DropGroup && !added.empty()) {
      std::erase(blocks, added.back());
      added.pop_back();
    }
  };
  for (; next < course.changes.size() && course.changes[next].step < begin; ++next) {
    take(course.changes[next]);
  }
  Parameters attached = now;
  auto sharded = now.first(blocks);
  const std::string frozen_alone = "is frozen on this rank, and another rank computed a gradient";
  bool was_frozen = false;  // in the step before: a Ddp refuses the next backward()
  for (int step = begin; step < end; ++step) {
    bool overflows = false;
    std::vector<Parameters> parts;  // as each finds them
    for (; next < course.changes.size() && course.changes[next].step == step; ++next) {
      const Change& change = course.changes[next];
      while (std::ssize(parts) < change.part) parts.push_back(now);
      take(change);
      // Of the last rank's loss, which within a Join may have none.
      const bool has_last =
          phase.joined.empty() || step < course.first_joined(number) || phase.joined.back() > 0;
      overflows = overflows || (has_last && change.what == What::Overflow);
      if (change.what == What::Refresh ||
          (change.told && (change.what == What::Thaw || change.what == What::Replace ||
                           change.what == What::Tie || change.what == What::TieWeight))) {
        if (!is_fsdp) attached = now, was_frozen = false;
      }
      if (is_structural(change.what) && change.anew) sharded = now.first(blocks);
    }
    if (was_frozen) return frozen_alone;
    if (is_attached && !now.fits(attached))
      return is_fsdp ? "after Fsdp was attached: construct it again" : "call ddp.refresh()";
    const bool has_joined = step >= course.first_joined(number);
    while (std::ssize(parts) < (has_joined ? 1 : part_count)) parts.push_back(now);
    if (is_strict && lacks_gradients(attached, parts, ranks, course.lanes > 0)) return no_gradient;
    if (is_zero && !overflows && now.first(blocks) != sharded) {
      return "construct another ZeroOptimizer when parameters are added or replaced";
    }
    was_frozen = course.lanes > 0 && is_frozen_on_some(parts, ranks);
    if (was_frozen && is_fsdp) return frozen_alone;
  }
  const bool goes_on = phase.discarded > 0 && number + 1 < course.phases.size();
  if (was_frozen && goes_on) return frozen_alone;
  const std::vector<Parameters> parts(static_cast<size_t>(part_count), now);
  const bool lacks = is_strict && lacks_gradients(attached, parts, ranks, course.lanes > 0);
  return lacks && goes_on ? no_gradient : "";
}

}  // namespace lockstep::test::changes
