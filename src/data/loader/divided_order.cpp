#include "data/loader/divided_order.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <iterator>
#include <mutex>

namespace lockstep::data {
namespace {

struct Begun {
  DividedOrder order;
  uint64_t number;  // of its latest pass, from 1
};

// A program may make a sampler with another seed for each epoch.
constexpr size_t kKept = 64;

std::mutex mutex;
std::vector<Begun> begun;  // the latest last
std::atomic<uint64_t> passes = 0;

}  // namespace

std::string text_of(const DividedOrder& order) {
  const std::string samples = order.length > 0 ? fmt::format("{} samples, ", order.length) : "";
  return samples + (order.shuffle ? fmt::format("seed {}", order.seed) : "not shuffled");
}

void note_order(const SamplerState& state, const Shard& part) {
  if (part.count == 1) return;
  const DividedOrder order{.seed = state.shuffle ? state.seed : 0,
                           .length = state.length,
                           .parts = part.count,
                           .shuffle = state.shuffle};
  const std::lock_guard lock(mutex);
  const auto same = std::ranges::find(begun, order, &Begun::order);
  if (same != begun.end()) {
    begun.erase(same);
  } else if (begun.size() == kKept) {
    begun.erase(begun.begin());
  }
  begun.push_back({order, ++passes});
}

NewOrders::NewOrders() : since_(passes) {}

std::vector<DividedOrder> NewOrders::find() const {
  std::vector<DividedOrder> found;
  const std::lock_guard lock(mutex);
  for (const Begun& each : begun) {
    if (each.number > since_ && std::ranges::find(taken_, each.order) == taken_.end()) {
      found.push_back(each.order);
    }
  }
  return found;
}

bool NewOrders::any() {
  const uint64_t now = passes;
  if (now == since_) return false;
  if (!find().empty()) return true;
  since_ = now;
  return false;
}

std::vector<DividedOrder> NewOrders::take() {
  const uint64_t now = passes;
  std::vector<DividedOrder> found = find();
  since_ = now;
  std::ranges::copy(found, std::back_inserter(taken_));
  std::ranges::sort(found);
  return found;
}

}  // namespace lockstep::data
