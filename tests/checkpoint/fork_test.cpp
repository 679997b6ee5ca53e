// A child by fork() while its parent saves in the background.
#include "support/fork.h"

#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <atomic>
#include <memory>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/core/error.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::checkpoint {
namespace {

using test::in_a_child;
using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

// Brings nothing to the disk while it is held.
struct HeldDisk : FileSystem {
  int fsync(int fd) override {
    is_held.wait(true);
    return FileSystem::fsync(fd);
  }
  void let_go() {
    is_held = false;
    is_held.notify_all();
  }

  std::atomic<bool> is_held{false};
};

TEST(CheckpointerInAChild, LeavesItsParentsSaveAlone) {
  const test::Folder folder;
  test::spawn(2, [&](comm::World& world) {
    HeldDisk disk;
    torch::manual_seed(1);
    torch::nn::Linear net(8, 8);
    auto checkpoints = std::make_unique<Checkpointer>(
        world, folder.path(), CheckpointerOptions{.async = true, .files = &disk});
    checkpoints->track("net", net);
    checkpoints->save(1);
    checkpoints->finish();
    disk.is_held = true;
    checkpoints->save(2);
    in_a_child([&] {
      const auto refused =
          AllOf(HasSubstr("[checkpoint] the Checkpointer belongs to process"), HasSubstr("fork()"));
      EXPECT_THAT(message_of<ConfigError>([&] { checkpoints->finish(); }), refused);
      EXPECT_THAT(message_of<ConfigError>([&] { checkpoints->save(3); }), refused);
      checkpoints.reset();
    });
    disk.let_go();
    checkpoints->finish();
    EXPECT_EQ(checkpoints->restore_latest().value().step, 2);
  });
}

TEST(CheckpointerInAChild, OfOneRankIsTheChildsFromItsFirstSaveOn) {
  const test::Folder folder;
  test::isolated([&] {
    torch::nn::Linear net(8, 8);
    auto checkpoints = std::make_unique<Checkpointer>(comm::World::solo(), folder.path(),
                                                      CheckpointerOptions{.async = true});
    checkpoints->track("net", net);
    in_a_child([&] {
      checkpoints->save(1);
      checkpoints->save(2);
      checkpoints.reset();  // which waits for its thread
    });
    EXPECT_EQ(checkpoints->restore_latest().value().step, 2);
  });
}

}  // namespace
}  // namespace lockstep::checkpoint
