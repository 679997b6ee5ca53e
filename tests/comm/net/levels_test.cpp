// What host-then-net and the transports below it know of one call or one rank, beside what
// host_then_net_test.cpp has.
#include <c10/core/CPUAllocator.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <csignal>
#include <cstdlib>

#include "comm/transport.h"
#include "core/flight/segment.h"
#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using std::chrono::steady_clock;
using testing::AllOf;
using testing::HasSubstr;
using namespace std::chrono_literals;

const SpawnOptions kLevels{.hosts = {0, 0, 1, 1}, .timeout = 20s};

// Each level counts its own steps: one call may be several, and some ranks take part in none.
TEST(Levels, ACallIsRecordedWithTheNumberThatErrorsQuote) {
  const flight::Segment segment(4);
  spawn_bare(4,
             [&](int) {
               setenv(flight::kVariable, std::to_string(segment.fd()).c_str(), 1);
               const auto world = World::from_env();
               const Group group = world.group();
               group.empty({8});  // two steps within the host
               group.all_reduce(at::ones({2'000'000})).wait();
               group.all_to_all(at::ones({4}), at::ones({4})).wait();
               group.broadcast(at::ones({4}), 2).wait();
               group.all_reduce(at::ones({4})).wait();
             },
             {.hosts = {0, 0, 1, 1}});
  for (int rank = 0; rank < 4; ++rank) {
    const flight::Log log = segment.read(rank);
    ASSERT_EQ(log.last.size(), 4u) << "rank " << rank;
    for (uint32_t i = 0; i < 4; ++i) {
      EXPECT_EQ(log.last[i].number, i + 1) << "rank " << rank << ": " << log.last[i].text();
    }
  }
}

// libtorch's allocator, without memory for one size.
class Scarce final : public c10::Allocator {
 public:
  explicit Scarce(size_t refused) : refused_(refused), all_(c10::GetCPUAllocator()) {
    c10::SetCPUAllocator(this);
  }
  ~Scarce() override { c10::SetCPUAllocator(all_); }
  Scarce(const Scarce&) = delete;
  Scarce& operator=(const Scarce&) = delete;

  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(bytes != refused_, "no memory");
    return all_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return all_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    all_->copy_data(to, from, count);
  }

 private:
  const size_t refused_;
  c10::Allocator* const all_;
};

TEST(Levels, ACallThatThrewBeforeItBeganIsNotCounted) {
  spawn(
      4,
      [](World& world) {
        const Group group = world.group();
        const at::Tensor sum = at::ones({12345});
        if (world.rank() == 1) {
          const Scarce memory(sum.nbytes());  // of the copy that keeps the tensor's values
          EXPECT_THROW(group.reduce(sum, 0), c10::Error);
        }
        group.reduce(sum, 0).wait();
        EXPECT_EQ(sum[12344].item<float>(), world.rank() == 0 ? 4.f : 1.f);
        // Its ranks meet by that number.
        const Group part = group.split(0);
        const at::Tensor one = at::ones({1});
        part.all_reduce(one).wait();
        EXPECT_EQ(one.item<float>(), 4.f);
      },
      kLevels);
}

// After all have agreed to make the group, and before it comes. Rank 0 serves the store.
void make_without(int lost) {
  SpawnOptions options = kLevels;
  options.doomed = {lost};
  spawn(
      4,
      [lost](World& world) {
        const int left = 5 - lost;
        world.group().barrier().wait();
        if (world.rank() == lost) raise(SIGKILL);
        if (world.rank() != left) return world.store().wait({"over"});
        const auto start = steady_clock::now();
        EXPECT_THAT(
            message_of<CommError>([&] {
              world.group().transport().subset({2, 3}, 0);
            }),
            AllOf(HasSubstr(fmt::format("rank {} (process", lost - 2)), HasSubstr("has ended")));
        EXPECT_LT(steady_clock::now() - start, 10s);  // of a deadline of 20 s
        world.store().set("over", "");
      },
      options);
}

TEST(Levels, APartOnOneHostNoticesThatTheRankThatMakesItHasEnded) { make_without(2); }
TEST(Levels, APartOnOneHostNoticesThatARankHasEndedBeforeItCame) { make_without(3); }

}  // namespace
}  // namespace lockstep::test
