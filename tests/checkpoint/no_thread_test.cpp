// A save in the background where one rank may have no further thread: it writes its share itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <cerrno>

#include "lockstep/checkpoint/checkpointer.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/threads.h"
#include "support/thrown.h"

namespace lockstep::checkpoint {
namespace {

using testing::HasSubstr;

struct Disk : FileSystem {
  int fsync(int fd) override {
    if (!is_broken) return FileSystem::fsync(fd);
    errno = EIO;
    return -1;
  }
  bool is_broken = false;
};

TEST(CheckpointerWithoutAThread, WritesTheRanksShareInSave) {
  const test::Folder folder;
  test::spawn(2, [&](comm::World& world) {
    Disk disk;
    torch::manual_seed(1);
    torch::nn::Linear net(8, 8);
    Checkpointer checkpoints(world, folder.path(), {.async = true, .files = &disk});
    checkpoints.track("net", net);
    if (world.rank() == 1) test::forbid_threads();
    checkpoints.save(1);
    checkpoints.finish();
    EXPECT_EQ(checkpoints.restore_latest().value().step, 1);
    // What goes wrong is the next call's, as it is of a thread.
    disk.is_broken = world.rank() == 1;
    checkpoints.save(2);
    EXPECT_THAT(test::message_of<CheckpointError>([&] { checkpoints.save(3); }),
                HasSubstr("step 2 was not saved in full:\n  rank 1: "));
    disk.is_broken = false;
    checkpoints.save(3);
    checkpoints.finish();
    EXPECT_EQ(checkpoints.restore_latest().value().step, 3);
  });
}

}  // namespace
}  // namespace lockstep::checkpoint
