// Collectives of ranks on several NUMA nodes, which LOCKSTEP_NUMA_NODE pretends.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <sys/mman.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <numeric>
#include <thread>

#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::comm::numa {
namespace {

using namespace std::chrono_literals;
using test::message_of;
using test::spawn_bare;
using testing::AllOf;
using testing::HasSubstr;
using Layout = std::vector<int>;  // node of each rank; -1: not said

const Layout kTwoNodes = {0, 0, 0, 0, 1, 1, 1, 1};

void on_nodes(const Layout& layout, const std::function<void(World&)>& body,
              const std::vector<int>& doomed = {}) {
  spawn_bare(static_cast<int>(layout.size()),
             [&](int rank) {
               if (layout[rank] >= 0)
                 setenv("LOCKSTEP_NUMA_NODE", std::to_string(layout[rank]).c_str(), 1);
               World world = World::from_env({.timeout = 60s});
               body(world);
             },
             {.doomed = doomed});
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

at::Tensor rough(int64_t count, int rank, at::ScalarType dtype) {
  auto generator = at::detail::createCPUGenerator(1000 + rank);
  const at::Tensor values = at::randn({count}, generator, at::kDouble)
                                .mul_(at::randn({count}, generator, at::kDouble).exp_());
  if (dtype == at::kBool) return values > 0;
  if (at::isIntegralType(dtype, false)) return (values * 1000).to(at::kLong).to(dtype);
  return at::isComplexType(dtype) ? at::complex(values, values.flip(0)).to(dtype)
                                  : values.to(dtype);
}

class Numa : public testing::TestWithParam<Layout> {};
INSTANTIATE_TEST_SUITE_P(Of, Numa,
                         testing::Values(Layout{0, 1}, Layout{0, 0, 1}, Layout{0, 0, 1, 1},
                                         Layout{0, 0, 0, 1, 1, 1}, Layout{0, 0, 0, 0, 1, 1, 1},
                                         kTwoNodes, Layout{0, 0, 0, 0, 0, 1, 1, 1}),
                         [](const auto& test) {
                           std::string name;
                           for (const int node : test.param) name += std::to_string(node);
                           return name;
                         });

// The private tensors' sums know no nodes.
TEST_P(Numa, GroupMemoryHasTheBitsOfPrivateMemory) {
  on_nodes(GetParam(), [](World& world) {
    const Group& group = world.group();
    const int size = group.size(), rank = group.rank();
    using enum ReduceOp;
    const std::vector<ReduceOp> arithmetic = {Sum, Average, Min, Max, Product};
    const std::vector<std::pair<at::ScalarType, std::vector<ReduceOp>>> kinds = {
        {at::kFloat, arithmetic},
        {at::kDouble, arithmetic},
        {at::kHalf, arithmetic},
        {at::kBFloat16, arithmetic},
        {at::kFloat8_e4m3fn, arithmetic},
        {at::kFloat8_e5m2, arithmetic},
        {at::kChar, arithmetic},
        {at::kShort, arithmetic},
        {at::kInt, {Sum, Average, Min, Max, Product, BitwiseAnd, BitwiseOr, BitwiseXor}},
        {at::kLong, arithmetic},
        {at::kByte, arithmetic},
        {at::kUInt16, arithmetic},
        {at::kUInt32, arithmetic},
        {at::kUInt64, arithmetic},
        {at::kBool, {Sum, Min, Max, Product}},
        {at::kComplexFloat, {Sum, Average, Product}},
        {at::kComplexDouble, {Sum, Average, Product}}};
    for (const auto& [dtype, operations] : kinds) {
      const int64_t count = (300 << 10) / static_cast<int64_t>(c10::elementSize(dtype)) + 13;
      const at::Tensor values = rough(count, rank, dtype);
      std::vector<int64_t> sizes(size, count / size);
      sizes[0] += count % size - 7;  // unequal parts
      sizes[size - 1] += 7;
      for (const ReduceOp op : operations) {
        const at::Tensor expected = values.clone(), in_place = group.empty({count}, dtype);
        group.all_reduce(expected, op).wait();
        in_place.copy_(values);
        group.all_reduce(in_place, op).wait();
        EXPECT_TRUE(same_bits(in_place, expected)) << dtype << ", operation " << int(op);

        in_place.copy_(values);
        const at::Tensor part = at::empty({sizes[rank]}, dtype);
        group.reduce_scatter(part, in_place.split_with_sizes(sizes), op).wait();
        const int64_t begin = std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
        EXPECT_TRUE(same_bits(part, expected.narrow(0, begin, sizes[rank])))
            << "scattered " << dtype << ", operation " << int(op);
        EXPECT_TRUE(same_bits(in_place, values)) << "the input";
      }
    }
  });
}

// One rank's data is private, another rank's lies elsewhere in its memory.
TEST_P(Numa, RanksMayHaveTheirDataInDifferentPlaces) {
  on_nodes(GetParam(), [](World& world) {
    const Group& group = world.group();
    const int64_t count = 100'001;
    const at::Tensor memory = group.empty({3 * count}),
                     expected = rough(count, world.rank(), at::kFloat);
    const at::Tensor values = expected.clone();
    group.all_reduce(expected).wait();
    for (const bool is_private : {false, true}) {
      at::Tensor data = memory.narrow(0, world.rank() % 3 * count, count);
      if (is_private && world.rank() == 0) data = at::empty({count});
      data.copy_(values);
      group.all_reduce(data).wait();
      EXPECT_TRUE(same_bits(data, expected));
    }
  });
}

// Pages of other nodes' ranks that this rank has read or written, counted where it faults.
struct Counted {
  static constexpr int64_t kPage = 4096;
  static inline char* begin;
  static inline char* end;
  static inline std::vector<bool> is_known;
  static inline std::atomic<int64_t> reads, writes;

  // The first read and the first write of a page, which no call writes without having read it.
  static void on_fault(int, siginfo_t* info, void*) {
    char* const page = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(info->si_addr) &
                                               ~static_cast<uintptr_t>(kPage - 1));
    if (page < begin || page >= end) _exit(99);
    auto known = is_known[(page - begin) / kPage];
    ++(known ? writes : reads);
    mprotect(page, kPage, known ? PROT_READ | PROT_WRITE : PROT_READ);
    known = true;
  }
};

// Bytes that all ranks together move between nodes in one call; `in_steps`: whether ranks know
// their nodes.
int64_t moved_bytes(bool in_steps,
                    const std::function<void(const Group&, const at::Tensor&)>& call) {
  auto* const total = static_cast<std::atomic<int64_t>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  on_nodes(in_steps ? kTwoNodes : Layout(8, -1), [&](World& world) {
    const Group& group = world.group();
    constexpr int64_t kBytes = 4 << 20;
    const at::Tensor data = group.empty({kBytes / 4});
    data.fill_(world.rank());
    call(group, data);
    struct sigaction action {};
    action.sa_sigaction = Counted::on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, nullptr);
    // The ranks' parts of the memory follow each other; those of the other node are one range.
    char* const first = static_cast<char*>(data.data_ptr()) - world.rank() * kBytes;
    Counted::begin = first + (world.rank() < 4 ? 4 : 0) * kBytes;
    Counted::end = Counted::begin + 4 * kBytes;
    Counted::is_known.assign(4 * kBytes / Counted::kPage, false);
    ASSERT_EQ(mprotect(Counted::begin, 4 * kBytes, PROT_NONE), 0);
    group.barrier().wait();
    call(group, data);
    *total += (Counted::reads + Counted::writes) * Counted::kPage;
    mprotect(Counted::begin, 4 * kBytes, PROT_READ | PROT_WRITE);
  });
  const int64_t bytes = *total;
  munmap(total, 4096);
  return bytes;
}

// 8 ranks on 2 nodes: each rank reads half of the data from the other node and writes as much, or
// reads an eighth twice.
TEST(NumaBytes, AllReduceMovesAQuarter) {
  const auto call = [](const Group& group, const at::Tensor& data) {
    group.all_reduce(data).wait();
  };
  constexpr int64_t kData = 4 << 20;
  EXPECT_EQ(moved_bytes(false, call), 8 * kData);
  EXPECT_EQ(moved_bytes(true, call), 2 * kData);
}

// What is left goes through the slots of the ranks that have summed it up (numa_nodes_test.cpp).
TEST(NumaBytes, ReduceScatterReadsNoInputOfTheOtherNode) {
  const auto call = [](const Group& group, const at::Tensor& data) {
    const at::Tensor part = at::empty({data.numel() / 8});
    group.reduce_scatter(part, data).wait();
  };
  EXPECT_EQ(moved_bytes(false, call), 4 * (int64_t{4} << 20));
  EXPECT_EQ(moved_bytes(true, call), 0);
}

enum class End { Dies, StaysAway, Aborts, CallsAnother };

class NumaFailure : public testing::TestWithParam<std::tuple<bool, End>> {};
INSTANTIATE_TEST_SUITE_P(Of, NumaFailure,
                         testing::Combine(testing::Bool(),
                                          testing::Values(End::Dies, End::StaysAway, End::Aborts,
                                                          End::CallsAnother)));

// Rank 7 begins a call last, so that it takes the first step and cannot take the second.
TEST_P(NumaFailure, InTheMiddleIsAnErrorOfAllRanks) {
  const auto [scatters, end] = GetParam();
  struct Turns {
    std::atomic<int> begun, seventh, over;
  };
  auto* const turns = static_cast<Turns*>(
      mmap(nullptr, sizeof(Turns), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const auto until = [](const std::atomic<int>& turn, int count) {
    while (turn < count) std::this_thread::yield();
  };
  on_nodes(
      kTwoNodes,
      [&](World& world) {
        const Group& group = world.group();
        const at::Tensor data = group.empty({800'000}), part = at::empty({100'000});
        data.fill_(1 + world.rank());
        const auto begin = [&](std::chrono::milliseconds timeout) {
          const CallOptions options{.timeout = timeout, .label = "bucket 3"};
          return scatters ? group.reduce_scatter(part, data, ReduceOp::Sum, options)
                          : group.all_reduce(data, ReduceOp::Sum, options);
        };
        group.barrier().wait();
        std::string said;
        if (world.rank() != 7) {
          Work work = begin(end == End::StaysAway ? 300ms : 60s);
          ++turns->begun;
          until(turns->seventh, 1);
          said = message_of<CommError>([&] { work.wait(); });
          ++turns->over;
        } else {
          until(turns->begun, 7);
          if (end == End::CallsAnother) {
            said =
                message_of<CommError>([&] { group.all_reduce(data.narrow(0, 0, 799'999)).wait(); });
            turns->seventh = 1;
          } else {
            Work work = begin(60s);
            if (end == End::Aborts) group.abort("bad data");
            turns->seventh = 1;
            if (end == End::Dies) raise(SIGKILL);
            if (end == End::StaysAway) until(turns->over, 7);
            said = message_of<CommError>([&] { work.wait(); });
          }
        }
        const char* why = end == End::Dies        ? "rank 7 (process"
                          : end == End::StaysAway ? "timed out after 0.3 s"
                          : end == End::Aborts    ? "bad data"
                                                  : "disagree";
        EXPECT_THAT(said, HasSubstr(why));
        if (end == End::StaysAway && said.find("aborted") == said.npos) {
          EXPECT_THAT(said, AllOf(HasSubstr("rank 7 is at"), HasSubstr("bucket 3")));
        }
        // Each rank has taken the step before.
        if (!scatters && end != End::CallsAnother && world.rank() == 0) {
          EXPECT_GT(data[0].item<float>(), 1);
        }
      },
      end == End::Dies ? std::vector<int>{7} : std::vector<int>{});
  munmap(turns, sizeof(Turns));
}

// Calls that are waited for in another order than they were made in, and asked for.
TEST_P(Numa, ManyCallsMayBeUnderWay) {
  on_nodes(GetParam(), [](World& world) {
    const Group& group = world.group();
    const int size = group.size(), sum = size * (size + 1) / 2;
    const at::Tensor data = group.empty({4, 80'000}), small = at::empty({3});
    for (int step = 1; step <= 5; ++step) {
      data.fill_(step * (1 + world.rank()));
      small.fill_(world.rank());
      std::vector<Work> works;
      for (int i = 0; i < 4; ++i) {
        works.push_back(group.all_reduce(data[i]));
        if (i == 1) works.push_back(group.all_reduce(small));
        if (world.rank() == 0) works.push_back(group.send(data[i].narrow(0, 0, 0), 1, i));
        if (world.rank() == 1) works.push_back(group.recv(at::empty({0}), 0, i));
      }
      if (step % 2 == 0) std::reverse(works.begin(), works.end());
      while (step > 3 && !works.back().is_completed()) std::this_thread::yield();
      for (Work& work : works) work.wait();
      EXPECT_TRUE(at::equal(data, at::full({4, 80'000}, float(step * sum))));
      EXPECT_EQ(small[2].item<float>(), size * (size - 1) / 2);
    }
  });
}

}  // namespace
}  // namespace lockstep::comm::numa
