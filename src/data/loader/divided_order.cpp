#include "data/loader/divided_order.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <iterator>
#include <map>
#include <mutex>
#include <set>

namespace lockstep::data {
namespace {

struct Begun {
  DividedOrder order;
  std::thread::id thread;
  uint64_t number;  // of its latest pass, from 1
};

// A program may make a sampler with another seed for each epoch.
constexpr size_t kKept = 64;

std::mutex mutex;
std::vector<Begun> begun;  // the latest last
std::atomic<uint64_t> passes = 0;

// By thread, what it trains. A Ddp may be static, and end after all that has a destructor here.
std::map<std::thread::id, std::set<const NewOrders*>>& users() {
  static auto& all = *new std::map<std::thread::id, std::set<const NewOrders*>>;
  return all;
}

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
  const auto thread = std::this_thread::get_id();
  const std::lock_guard lock(mutex);
  const auto same = std::ranges::find_if(
      begun, [&](const Begun& each) { return each.order == order && each.thread == thread; });
  if (same != begun.end()) {
    begun.erase(same);
  } else if (begun.size() == kKept) {
    begun.erase(begun.begin());
  }
  begun.push_back({order, thread, ++passes});
}

NewOrders::NewOrders() : since_(passes) { note_thread(); }

NewOrders::~NewOrders() {
  const std::lock_guard lock(mutex);
  for (auto& [thread, trained] : users()) trained.erase(this);
  std::erase_if(users(), [](const auto& user) { return user.second.empty(); });
}

void NewOrders::note_thread() const {
  const std::lock_guard lock(mutex);
  users()[std::this_thread::get_id()].insert(this);
}

std::vector<DividedOrder> NewOrders::find() const {
  std::vector<DividedOrder> found;
  note_thread();
  const std::lock_guard lock(mutex);
  for (const Begun& each : begun) {
    if (each.number <= since_ || std::ranges::find(taken_, each.order) != taken_.end()) continue;
    if (std::ranges::find(found, each.order) != found.end()) continue;
    const auto user = users().find(each.thread);
    if (user == users().end() || user->second.contains(this)) found.push_back(each.order);
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
