// The directory's own path: its bytes, and symbolic links on the way to it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "lockstep/checkpoint/checkpointer.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::Damaged;
using testing::HasSubstr;

TEST(CheckpointPath, MayHoldAnyByte) {
  const Folder folder;
  const std::string path = folder / "two\nlines\t";
  for (const bool saves : {true, false}) {
    spawn(2, [&](World& world) {
      int64_t epoch = saves ? 7 : 0;
      Checkpointer checkpoints(world, path);
      checkpoints.track("epoch", epoch);
      if (saves) return checkpoints.save(1);
      for (const Damaged damaged : {Damaged::Error, Damaged::FallBack}) {
        const auto found = checkpoints.restore_latest({.damaged = damaged});
        ASSERT_TRUE(found);
        EXPECT_EQ(epoch, 7);
      }
    });
  }
}

TEST(CheckpointPath, WithALinkThatLeadsNowhereIsNotTakenForAnEmptyOne) {
  const Folder folder;
  std::filesystem::create_symlink(folder / "not mounted", folder / "link");
  spawn(2, [&](World& world) {
    int64_t epoch = 0;
    for (const char* path : {"link", "link/", "link/run"}) {
      Checkpointer checkpoints(world, folder / path);
      checkpoints.track("epoch", epoch);
      for (const Damaged damaged : {Damaged::Error, Damaged::FallBack}) {
        EXPECT_THAT(message_of([&] { checkpoints.restore_latest({.damaged = damaged}); }),
                    HasSubstr("link is a symbolic link to " + (folder / "not mounted") +
                              ", which is not there"));
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::test
