// What is refused, found from the course alone.
#include <algorithm>
#include <array>
#include <map>
#include <set>

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
  // Whether what was attached to `before` is right for this.
  bool fits(const Parameters& before) const {
    return first(kAll) == before.first(kAll) && std::ranges::includes(frozen, before.frozen);
  }
};

}  // namespace

std::string refusal_of(const Course& course, size_t number) {
  const Phase& phase = course.phases[number];
  const int begin = course.begin(number), end = begin + phase.steps;
  if (phase.kind == Kind::Local) return {};
  const bool is_fsdp = phase.kind == Kind::Fsdp;
  const bool is_zero = phase.kind == Kind::Zero || phase.kind == Kind::SharedZero;
  const bool is_attached = phase.ranks.size() > 1 || course.lanes > 0 || is_fsdp;
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
  for (int step = begin; step < end; ++step) {
    bool overflows = false;
    for (; next < course.changes.size() && course.changes[next].step == step; ++next) {
      const Change& change = course.changes[next];
      take(change);
      overflows = overflows || change.what == What::Overflow;
      if (change.what == What::Refresh ||
          (change.told && (change.what == What::Thaw || change.what == What::Replace ||
                           change.what == What::Tie || change.what == What::TieWeight))) {
        if (!is_fsdp) attached = now;
      }
      if (is_structural(change.what) && change.anew) sharded = now.first(blocks);
    }
    if (is_attached && !now.fits(attached))
      return is_fsdp ? "after Fsdp was attached: construct it again" : "call ddp.refresh()";
    if (is_zero && !overflows && now.first(blocks) != sharded) {
      return "construct another ZeroOptimizer when parameters are added or replaced";
    }
  }
  return {};
}

}  // namespace lockstep::test::changes
