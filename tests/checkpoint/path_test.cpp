// The directory's own path: its bytes, and symbolic links on the way to it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "support/without_stdout.h"

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

// Relative, it is one of the working directory in which the Checkpointer was made.
TEST(CheckpointPath, StaysWhereItIsWhenTheProgramChangesItsWorkingDirectory) {
  const Folder folder, elsewhere;
  for (const bool async : {false, true}) {
    const std::string name = async ? "behind/" : "run";
    spawn(2, [&](World& world) {
      std::filesystem::current_path(folder.path());
      int64_t epoch = 7;
      Checkpointer checkpoints(world, name, {.async = async});
      checkpoints.track("epoch", epoch);
      checkpoints.save(1);
      std::filesystem::current_path(elsewhere.path());
      checkpoints.save(2);
      checkpoints.finish();
      epoch = 0;
      const auto found = checkpoints.restore_latest();
      ASSERT_TRUE(found);
      EXPECT_EQ(found->folder, folder / (async ? "behind" : "run") + "/step-00000002");
      EXPECT_EQ(epoch, 7);
    });
  }
  EXPECT_TRUE(std::filesystem::is_empty(elsewhere.path()));
}

// Each rank reads by its own path of it, as where hosts have it mounted in different places.
TEST(CheckpointPath, MayDifferBetweenRanks) {
  const Folder folder;
  std::filesystem::create_directory(folder / "one");
  std::filesystem::create_directory_symlink(folder / "one", folder / "other");
  spawn(2, [&](World& world) {
    const std::string own = folder / (world.rank() == 0 ? "one" : "other") + "/run";
    int64_t epoch = 7;
    Checkpointer checkpoints(world, own);
    checkpoints.track("epoch", epoch);
    checkpoints.save(1);
    const auto found = checkpoints.restore_latest();
    ASSERT_TRUE(found);
    EXPECT_EQ(found->folder, own + "/step-00000001");
  });
}

// What a program prints would go into the file whose descriptor is stdout's number.
TEST(CheckpointPath, NoFileIsStdoutOfAProgramWithoutOne) {
  spawn(1, [](World& world) {
    const Folder folder;
    const WithoutStdout closed;
    const auto print = [] { std::fputs("not of this file\n", stdout), std::fflush(stdout); };
    int64_t epoch = 7;
    Checkpointer checkpoints(world, folder / "runs", {.async = true});
    checkpoints.track("epoch", epoch);
    for (const int64_t step : {1, 2}) {
      print();
      checkpoints.save(step);
      print();
    }
    checkpoints.finish();
    std::ifstream lock(folder / "runs/.lock");
    const std::string holder{std::istreambuf_iterator<char>(lock), {}};
    EXPECT_EQ(holder.find("not of"), holder.npos) << holder;
    for (const char* step : {"runs/step-00000001", "runs/step-00000002"}) {
      EXPECT_THAT(checkpoint::verify(folder / step), testing::IsEmpty());
    }
  });
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
