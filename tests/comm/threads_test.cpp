// How many threads a rank computes with, and each of its threads.
#include "comm/host/threads.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cstdlib>
#include <functional>
#include <semaphore>
#include <thread>

#include "support/spawn.h"
#include "support/threads.h"

namespace lockstep::comm {
namespace {

using test::isolated;
using test::spawn_bare;
using test::threads_of_process;
using testing::AllOf;
using testing::HasSubstr;

using Kernel = std::pair<const char*, std::function<void()>>;

// What goes round libtorch's own loops, to MKL and to oneDNN. The operands are made by the caller,
// since filling them would be such a loop.
std::vector<Kernel> kernels() {
  const at::Tensor square = at::ones({256, 256}), narrow = square.to(at::kBFloat16),
                   row = at::ones({1 << 18});
  const at::Tensor batch = at::ones({8, 64, 512}), images = at::ones({8, 16, 32, 32}),
                   filters = at::ones({32, 16, 3, 3});
  return {{"mm", [=] { (void)at::mm(square, square); }},
          {"mm of bfloat16", [=] { (void)at::mm(narrow, narrow); }},
          {"bmm", [=] { (void)at::bmm(batch, batch.mT()); }},
          {"conv2d", [=] { (void)at::conv2d(images, filters); }},
          {"dot", [=] { (void)at::dot(row, row); }},
          {"svd", [=] { (void)at::linalg_svd(square); }},
          {"add", [=] { (void)at::add(row, 1); }}};
}

// Two ranks that nobody has given a number of threads; libtorch has all cores of the machine.
void on_two_ranks(const std::function<void()>& body) {
  spawn_bare(2, [&](int) {
    unsetenv("OMP_NUM_THREADS");
    at::set_num_threads(static_cast<int>(this_process_cores().ids.size()));
    body();
  });
}
int share_of_two() {
  const Cores own = this_process_cores();
  const auto cores = static_cast<int>(own.ids.size());
  return std::max(1, (own.allowed > 0 ? std::min(own.allowed, cores) : cores) / 2);
}

TEST(Threads, OfEachThreadOfARankAreItsShare) {
  on_two_ranks([] {
    const World world = World::from_env();
    EXPECT_EQ(at::get_num_threads(), share_of_two());
    EXPECT_THAT(world.describe(), HasSubstr(fmt::format(", {} thread", share_of_two())));
    for (const Kernel& kernel : kernels()) {
      std::thread([&] {
        const int64_t before = threads_of_process();
        kernel.second();
        EXPECT_LE(threads_of_process() - before + 1, share_of_two()) << kernel.first;
      }).join();
    }
  });
}

TEST(Threads, OfAThreadThatWasThereBeforeToo) {
  on_two_ranks([] {
    std::binary_semaphore has_computed(0), may_go_on(0);
    const auto sum = kernels().back().second;
    std::thread older([&] {
      sum();  // with all cores
      has_computed.release();
      may_go_on.acquire();
      sum();
      EXPECT_EQ(at::get_num_threads(), share_of_two());
    });
    has_computed.acquire();
    const World world = World::from_env();
    may_go_on.release();
    older.join();
  });
}

// As lanes give one, after World::from_env() has.
TEST(Threads, OfAThreadThatHasComputedFollowALaterNumber) {
  isolated([] {
    compute_with(2);
    std::binary_semaphore has_computed(0), may_go_on(0);
    const auto product = kernels().front().second;
    std::thread older([&] {
      product();
      EXPECT_EQ(at::get_num_threads(), 2);
      has_computed.release();
      may_go_on.acquire();
      product();
      EXPECT_EQ(at::get_num_threads(), 1);
    });
    has_computed.acquire();
    compute_with(1);
    may_go_on.release();
    older.join();
  });
}

TEST(Threads, AreSharedWithoutANumberOfRanksOfThisHost) {
  on_two_ranks([] {
    unsetenv("LOCAL_WORLD_SIZE");
    const World world = World::from_env();
    EXPECT_EQ(at::get_num_threads(), share_of_two());
  });
}

TEST(Threads, AreNoMoreThanTheProgramHasSet) {
  on_two_ranks([] {
    at::set_num_threads(1);
    const World world = World::from_env();
    const auto product = kernels().front().second;
    std::thread([&] {
      const int64_t before = threads_of_process();
      product();
      EXPECT_EQ(threads_of_process(), before);
    }).join();
  });
}

// Ranks of one machine with these cores, and 16 threads each unless said.
std::vector<Cores> ranks_on(const std::vector<std::string>& lists) {
  std::vector<Cores> ranks;
  for (const auto& list : lists)
    ranks.push_back({.machine = "a", .ids = cores_of_text(list), .threads = 16, .is_fixed = false});
  return ranks;
}

TEST(Threads, AreThePartOfTheCoresThatNoOtherRankUses) {
  EXPECT_EQ(fair_threads(ranks_on({"0-3"})), 4);
  EXPECT_EQ(fair_threads(ranks_on({"0-3", "0-3"})), 2);
  EXPECT_EQ(fair_threads(ranks_on({"0-1", "0-1"})), 1) << "two of four cores for both";
  EXPECT_EQ(fair_threads(ranks_on({"0-1", "2-3"})), 2) << "each bound";
  EXPECT_EQ(fair_threads(ranks_on({"0-2", "0-2", "0-2"})), 1);
  EXPECT_EQ(fair_threads(ranks_on({"0", "0", "0"})), 1);
  EXPECT_EQ(fair_threads(ranks_on({"0-7", "0-3"})), 2) << "the same for all";
  EXPECT_EQ(fair_threads(ranks_on({"", ""})), 16) << "cores unknown";
  auto ranks = ranks_on({"0-3", "0-3"});
  ranks[1].machine = "b";
  EXPECT_EQ(fair_threads(ranks), 4);
  ranks[1].threads = 3;
  EXPECT_EQ(fair_threads(ranks), 3);
}

TEST(Threads, AreForTheTimeThatControlGroupsAllow) {
  auto ranks = ranks_on({"0-15", "0-15"});
  for (auto& rank : ranks) rank.allowed = 4;
  EXPECT_EQ(fair_threads(ranks), 2) << "of one container";
  ranks[1].container = "b";
  EXPECT_EQ(fair_threads(ranks), 4) << "of a container each";
  ranks[0].allowed = 1;
  EXPECT_EQ(fair_threads(ranks), 1) << "the same for all";
}

TEST(Threads, OfRanksThatDifferAreToldOnce) {
  auto ranks = ranks_on({"0-3", "0-3", "0-3"});
  EXPECT_EQ(uneven_threads(ranks), "");
  ranks[2].is_fixed = true;
  EXPECT_THAT(uneven_threads(ranks),
              AllOf(HasSubstr("rank 0 computes with 1 thread, rank 2 with 16"),
                    HasSubstr("OMP_NUM_THREADS")));
  for (auto& rank : ranks) rank.is_fixed = true;
  EXPECT_EQ(uneven_threads(ranks), "");
}

TEST(Threads, CoresComeOutOfATextAsTheyWentIn) {
  for (const char* text : {"0", "0-3", "0-3,8", "1,3,5-7,64-127"})
    EXPECT_EQ(text_of_cores(cores_of_text(text)), text);
  EXPECT_TRUE(cores_of_text("").empty());
}

}  // namespace
}  // namespace lockstep::comm
