// What a program's own Stateful throws on one rank.
#include "support/thrown.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/checkpoint/directory.h"
#include "support/folder.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using checkpoint::State;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

struct Own : checkpoint::Stateful {
  State state(const checkpoint::Names&) const override {
    saves();
    return {.values = {{"number", int64_t{1}}}};
  }
  void restored(const State&) override { restores(); }

  std::function<void()> saves = [] {}, restores = [] {};
};

TEST(Thrown, ByAStatefulIsQuotedOnAllRanks) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const auto own = std::make_shared<Own>();
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("own", own);
    checkpoints.save(1);
    const auto on_one = [&](const std::function<void()>& fail) {
      return [&world, fail] {
        if (world.rank() == 1) fail();
      };
    };
    const auto save = [&] { checkpoints.save(2); };
    own->saves = on_one([] { throw 7; });
    EXPECT_THAT(message_of<CheckpointError>(save),
                HasSubstr("step 2 was not saved: rank 1: an exception that is not a std::except"));
    // Without libtorch's backtrace.
    own->saves = on_one([] { TORCH_CHECK(false, "an odd tensor"); });
    EXPECT_THAT(message_of<CheckpointError>(save),
                AllOf(HasSubstr("rank 1: an odd tensor"), Not(HasSubstr("frame #"))));
    own->saves = [] {};
    own->restores = on_one([] { throw 7; });
    EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.restore_latest(); }),
                HasSubstr("rank 1: an exception that is not a std::exception"));
    own->restores = [] {};
    EXPECT_EQ(checkpoints.restore_latest().value().step, 1);
    checkpoints.save(2);
    checkpoints.finish();
    EXPECT_THAT(message_of<ConfigError>(
                    [&] { checkpoints.track("none", std::shared_ptr<checkpoint::Stateful>()); }),
                HasSubstr("'none' cannot be tracked: it is a null pointer"));
  });
}

// A disk that takes no end, of a rank that is stopped.
struct StoppedFiles : checkpoint::FileSystem {
  ssize_t write(int, const char*, size_t) override {
    for (;;) pause();
  }
};

// Rank 0 has written its part, and its thread waits for rank 1's for up to half an hour.
TEST(Thrown, WhileASaveIsUnderWayEndsItsWaitForARankThatIsStopped) {
  const Folder folder;
  spawn(2,
        [&](World& world) {
          const auto pids = world.group().all_gather_bytes(std::to_string(getpid()));
          StoppedFiles stopped;
          const auto fails = [&] {
            at::Tensor a = at::ones({100'000}), b = a.clone();  // one of each rank
            checkpoint::FileSystem* files = world.rank() == 1 ? &stopped : nullptr;
            Checkpointer checkpoints(world, folder.path(), {.async = true, .files = files});
            checkpoints.track("a", a);
            checkpoints.track("b", b);
            checkpoints.save(1);
            if (world.rank() == 1) pause();
            throw DataError("mine");
          };
          EXPECT_THAT(message_of(fails), HasSubstr("mine"));
          EXPECT_FALSE(checkpoint::newest_checkpoint(folder.path()));  // the save was under way
          kill(std::stoi(pids[1]), SIGKILL);
        },
        {.timeout = std::chrono::seconds(10), .doomed = {1}});
}

}  // namespace
}  // namespace lockstep::test
