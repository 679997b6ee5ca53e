#include "comm/host/threads.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdint>
#include <limits>
#include <map>

#include "core/process/cgroup.h"
#include "core/process/cores.h"
#include "lockstep/core/environment.h"

namespace lockstep::comm {
namespace {

// How often compute_with() was called.
std::atomic<uint32_t> g_numbers{0};

// libtorch keeps one number of threads for the process, but a thread asks for it at its first
// parallel_for only. A matrix product or a convolution before that asks OpenMP, which has given
// every new thread all cores, and GNU's has no call that changes what new threads get. Almost all
// that a thread computes begins with memory for the result.
class TellingAllocator final : public c10::Allocator {
 public:
  explicit TellingAllocator(c10::Allocator* inner) : inner_(inner) {}
  c10::DataPtr allocate(size_t bytes) override {
    static thread_local uint32_t told = 0;
    if (const uint32_t last = g_numbers.load(std::memory_order_acquire); told != last) {
      told = last;
      at::init_num_threads();
    }
    return inner_->allocate(bytes);
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return inner_->is_simple_data_ptr(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* inner_;
};

// Of those that no OMP_NUM_THREADS has fixed, the part of each machine's cores that a rank has.
double share_of(const Cores& mine, const std::vector<Cores>& ranks) {
  std::map<int, int> users;
  for (const Cores& rank : ranks) {
    if (rank.machine != mine.machine) continue;
    for (const int id : rank.ids) ++users[id];
  }
  double share = 0;
  for (const int id : mine.ids) share += 1.0 / users[id];
  return share;
}

int ranks_in_container_of(const Cores& mine, const std::vector<Cores>& ranks) {
  return static_cast<int>(std::count_if(ranks.begin(), ranks.end(), [&](const Cores& rank) {
    return rank.container == mine.container;
  }));
}

}  // namespace

Cores this_process_cores() {
  Cores cores{.threads = at::get_num_threads(),
              .is_fixed = env_text("OMP_NUM_THREADS").has_value()};
  cores.ids = allowed_cores();
  cores.allowed = whole_group_cores().value_or(0);
  return cores;
}

std::string text_of_cores(const std::vector<int>& ids) {
  std::string text;
  for (size_t first = 0, last; first < ids.size(); first = last + 1) {
    last = first;
    while (last + 1 < ids.size() && ids[last + 1] == ids[last] + 1) ++last;
    text +=
        (text.empty() ? "" : ",") + (first == last ? fmt::format("{}", ids[first])
                                                   : fmt::format("{}-{}", ids[first], ids[last]));
  }
  return text;
}

std::vector<int> cores_of_text(const std::string& text) {
  std::vector<int> ids;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end) {
    int first = 0;
    at = std::from_chars(at, end, first).ptr;
    int last = first;
    if (at < end && *at == '-') at = std::from_chars(at + 1, end, last).ptr;
    for (int id = first; id <= last && id < CPU_SETSIZE; ++id) ids.push_back(id);
    ++at;
  }
  return ids;
}

int fair_threads(const std::vector<Cores>& ranks) {
  int least = std::numeric_limits<int>::max();
  for (const Cores& rank : ranks) {
    if (rank.is_fixed) continue;
    least = std::min(least, rank.threads);
    // One third of three cores is not quite one.
    if (!rank.ids.empty()) least = std::min(least, static_cast<int>(share_of(rank, ranks) + 1e-6));
    if (rank.allowed > 0)
      least = std::min(least, rank.allowed / ranks_in_container_of(rank, ranks));
  }
  return std::max(1, least);
}

std::string uneven_threads(const std::vector<Cores>& ranks) {
  const int fair = fair_threads(ranks);
  const auto threads = [&](size_t rank) {
    return ranks[rank].is_fixed ? ranks[rank].threads : fair;
  };
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    if (threads(rank) == threads(0)) continue;
    return fmt::format(
        "[world] rank 0 computes with {} thread{}, rank {} with {}: sums within a kernel then "
        "differ in their last bits "
        "between ranks; set the same OMP_NUM_THREADS for all",
        threads(0), threads(0) == 1 ? "" : "s", rank, threads(rank));
  }
  return "";
}

void compute_with(int threads) {
  at::set_num_threads(threads);
  g_numbers.fetch_add(1, std::memory_order_release);
  static TellingAllocator* const telling = new TellingAllocator(c10::GetCPUAllocator());
  c10::SetCPUAllocator(telling);
}

}  // namespace lockstep::comm
