// What `lockstep bench` measures.
#include "lockstep/plan/bench.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

#include "lockstep/core/error.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/tool.h"

namespace lockstep::plan {
namespace {

using test::lockstep_tool;
using testing::HasSubstr;

class Bench : public testing::Test {
 protected:
  const test::Folder folder_;
  const std::string file_ = folder_ / "machine.json";
};

TEST_F(Bench, AllRanksKnowTheSameMachineAndAPlanReadsIt) {
  test::spawn(2, [&](World& world) {
    const auto machine = measure_machine(world, {.seconds_each = 0.01, .largest_bytes = 1 << 16});
    const auto text = machine_json(machine);
    const auto all = world.group().all_gather_bytes(text);
    EXPECT_EQ(std::set<std::string>(all.begin(), all.end()).size(), 1);
    EXPECT_EQ(machine.devices_per_node, 2);
    EXPECT_TRUE(machine.device.shares_memory);
    EXPECT_EQ(machine.all_reduce.size(), 3);
    EXPECT_EQ(machine.all_gather.size(), 3);
    EXPECT_EQ(machine.reduce_scatter.size(), 3);
    if (world.is_main()) std::ofstream(file_) << text;
  });
  const auto read = read_machine(file_);
  EXPECT_TRUE(read.is_measured);
  EXPECT_EQ(read.all_gather.size(), 3);
  std::ofstream(folder_ / "run.yaml") << "model: {kind: mlp}\ndata: fashion-mnist\n";
  const auto plan = lockstep_tool("plan " + folder_ / "run.yaml" + " --machine " + file_);
  EXPECT_EQ(plan.status, 0) << plan.said;
  EXPECT_THAT(plan.said, HasSubstr("2 ranks on 2 x measured"));
  const std::string warning = "machine.json was measured with 2 ranks";
  EXPECT_THAT(plan.said, testing::Not(HasSubstr(warning)));
  for (const char* other : {"plan ", "simulate "}) {
    for (const auto& [flag, ranks] : {std::pair{" --ranks 1", "1 rank on a host"},
                                      std::pair{" --devices-per-node 4", "4 ranks on a host"}}) {
      const auto said =
          lockstep_tool(other + (folder_ / "run.yaml") + flag + " --machine " + file_).said;
      EXPECT_THAT(said, testing::AllOf(HasSubstr(warning), HasSubstr(ranks))) << other << flag;
    }
  }
}

TEST_F(Bench, TheCommandStartsRanksAndWritesTheFile) {
  const auto out = lockstep_tool("bench --nproc-per-node 1 --to " + file_);
  EXPECT_EQ(out.status, 0) << out.said;
  EXPECT_THAT(out.said, HasSubstr("wrote " + file_));
  EXPECT_EQ(read_machine(file_).devices_per_node, 1);
}

TEST_F(Bench, TheCommandPrintsWhatNoFileIsNamedFor) {
  const auto out = lockstep_tool("bench --nproc-per-node 1");
  EXPECT_EQ(out.status, 0) << out.said;
  std::ofstream(file_) << out.said;
  EXPECT_EQ(read_machine(file_).devices_per_node, 1);
}

TEST_F(Bench, TheProgramOfARankRefusesWhatItDoesNotKnow) {
  const std::string program = LOCKSTEP_BINARY_DIR "/bin/lockstep-bench ";
  for (const auto& words : {std::string("--against=nothing"), file_ + " " + file_,
                            std::string("--help"), std::string("--against=ddp --to")}) {
    const auto wrong = test::shell(program + words);
    EXPECT_EQ(wrong.status, 2) << wrong.said;
    EXPECT_THAT(wrong.said, HasSubstr("usage: lockstep-bench"));
  }
}

TEST_F(Bench, AFileMayHaveTheNameOfAFlag) {
  const auto folder = std::filesystem::path(file_).parent_path();
  const auto out =
      test::shell("cd " + folder.string() +
                  " && " LOCKSTEP_BINARY_DIR "/bin/lockstep bench --nproc-per-node 1 --to=-m.json");
  EXPECT_EQ(out.status, 0) << out.said;
  EXPECT_EQ(read_machine((folder / "-m.json").string()).devices_per_node, 1);
  std::filesystem::remove(folder / "-m.json");
}

// Beyond the limit of a file's size, as on a full disk.
TEST_F(Bench, AFileThatCannotBeReplacedStays) {
  std::ofstream(file_) << "mine";
  const auto failed =
      test::shell("ulimit -f 0; " LOCKSTEP_BINARY_DIR "/bin/lockstep-bench " + file_);
  EXPECT_EQ(failed.status, 1);
  EXPECT_THAT(failed.said, HasSubstr("cannot be written: File too large: name another file"));
  EXPECT_EQ(test::contents(file_), "mine");
}

TEST_F(Bench, WrongArgumentsAndFilesAreRefused) {
  const auto wrong = lockstep_tool("bench machine.json");
  EXPECT_EQ(wrong.status, 2) << wrong.said;
  EXPECT_THAT(wrong.said, HasSubstr("'machine.json' is not a flag"));
  const auto nowhere = lockstep_tool("bench --to /nowhere/machine.json");
  EXPECT_EQ(nowhere.status, 2) << nowhere.said;
  EXPECT_THAT(nowhere.said, HasSubstr("nothing can be written into /nowhere"));
  const auto folder = lockstep_tool("bench --to " + folder_.path());
  EXPECT_EQ(folder.status, 2) << folder.said;
  EXPECT_THAT(folder.said, HasSubstr("a folder: name a file in it"));
  const std::string loop = folder_ / "loop";
  std::filesystem::create_symlink("loop", loop);
  EXPECT_THAT(lockstep_tool("bench --to " + loop).said,
              HasSubstr("[bench] --to " + loop + ": Too many levels of symbolic links"));
}

TEST_F(Bench, CallsAndStepsAreComparedWithGlooInTurns) {
  for (const auto& [what, row] :
       {std::pair{"all_reduce", "own_memory_seconds"}, std::pair{"ddp", "without_ddp_seconds"}}) {
    const auto out =
        lockstep_tool(std::string("bench ") + what + " --nproc-per-node 2 --to " + file_);
    EXPECT_EQ(out.status, 0) << out.said;
    EXPECT_THAT(out.said, HasSubstr("Gloo"));
    EXPECT_THAT(out.said, HasSubstr("wrote " + file_ + "\n"));
    const auto json = nlohmann::json::parse(test::contents(file_));
    EXPECT_EQ(json.at("bench"), what);
    EXPECT_EQ(json.at("ranks"), 2);
    EXPECT_EQ(json.at("backend"), "shm");
    EXPECT_GE(json.at("rows").size(), 2U);
    for (const auto& each : json.at("rows")) {
      EXPECT_GT(each.at(row), 0);
      EXPECT_GT(each.at("gloo_seconds"), 0);
    }
  }
  const auto alone = lockstep_tool("bench all_reduce");
  EXPECT_EQ(alone.status, 2) << alone.said;
  EXPECT_THAT(alone.said, HasSubstr("one rank sends nothing: give --nproc-per-node 2 or more"));
  EXPECT_THAT(lockstep_tool("bench all_reduc").said, HasSubstr("the nearest is all_reduce"));
}

TEST_F(Bench, RanksOfSeveralHostsAreRefused) {
  test::spawn(2,
              [](World& world) {
                EXPECT_THAT(
                    [&] { measure_machine(world); },
                    testing::ThrowsMessage<ConfigError>(HasSubstr("the ranks of one node")));
              },
              {.backend = "auto", .hosts = {0, 1}});
}

TEST_F(Bench, OptionsThatMeasureNothingAreRefused) {
  test::spawn(2, [](World& world) {
    EXPECT_THROW(measure_machine(world, {.seconds_each = 0, .largest_bytes = 1023}), ConfigError);
    EXPECT_THROW(measure_machine(world, {.seconds_each = -1}), ConfigError);
    const auto machine = measure_machine(world, {.seconds_each = 0, .largest_bytes = 1024});
    EXPECT_EQ(machine.all_reduce.size(), 1);
  });
}

}  // namespace
}  // namespace lockstep::plan
