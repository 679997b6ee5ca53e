// Runs whose model is divided among the ranks, or computes in bfloat16.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <csignal>
#include <filesystem>
#include <string>

#include "lockstep/core/error.h"
#include "rl_policy/even_course.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using testing::HasSubstr;

// Runs that begin with one warm-up. Fsdp adds a norm up in another order than Ddp, so gradients are
// not clipped.
RunOptions whole(const Folder& folder, const std::string& name) {
  RunOptions o = options(folder / name);
  o.drop_equal_groups = false;
  o.max_grad_norm = 1e9;
  o.cache = true;
  o.cache_dir = folder / "cache";
  return o;
}

RunOptions divided(const Folder& folder, const std::string& name) {
  RunOptions o = whole(folder, name);
  o.parallel = "fsdp";
  return o;
}

TEST(DividedRun, LeavesTheBitsOfOneThatIsNot) {
  const Folder folder;
  const Left one = left_by_ranks(1, whole(folder, "one"));
  EXPECT_THAT(one.trajectories, HasSubstr("\"reward\":1.0"));
  EXPECT_EQ(left_by_ranks(1, divided(folder, "alone")), one);
  EXPECT_EQ(left_by_ranks(3, divided(folder, "three")), one);
  // Each rank gathers what it computes with.
  const auto o = divided(folder, "hosts");
  spawn(2, [&](World& world) { rl::run_continual(world, course(), o); }, {.hosts = {0, 1}});
  EXPECT_EQ(left_by(o.output_dir), one);
}

TEST(DividedRun, ComputesInBfloat16WithTheSameBitsOnAnyNumberOfRanks) {
  const Folder folder;
  const auto narrow = [](RunOptions o) {
    o.precision = "bf16";
    o.export_hf = true;
    return o;
  };
  const Left one = left_by_ranks(1, narrow(whole(folder, "one")));
  EXPECT_NE(one.fingerprint, left_by_ranks(1, whole(folder, "wide")).fingerprint);
  EXPECT_EQ(left_by_ranks(2, narrow(whole(folder, "two"))), one);
  EXPECT_EQ(left_by_ranks(3, narrow(divided(folder, "three"))), one);
  const auto exported = [&](const std::string& run) {
    return contents(folder /
                    (run + "/grpo_checkpoints/stage_2_again/huggingface/model.safetensors"));
  };
  EXPECT_EQ(exported("three"), exported("one"));
}

// Wherever the reference is, its log-probabilities are the same.
TEST(DividedRun, HasTheSameBitsWithItsReferenceInEachPlace) {
  const Folder folder;
  const Left one = left_by_ranks(1, whole(folder, "one"));
  struct Case {
    const char* reference;
    const char* parallel;
    int ranks;
  };
  for (const auto& [reference, parallel, ranks] :
       {Case{"resident", "fsdp", 2}, Case{"shard", "fsdp", 3}, Case{"offload", "fsdp", 2},
        Case{"offload", "ddp", 1}, Case{"offload", "ddp", 3}}) {
    const std::string name = fmt::format("{} {} {}", reference, parallel, ranks);
    auto o = whole(folder, name);
    o.reference = reference;
    o.parallel = parallel;
    EXPECT_EQ(left_by_ranks(ranks, o), one) << name;
    // Its files have no names.
    for (const auto& entry : std::filesystem::directory_iterator(o.output_dir)) {
      EXPECT_EQ(entry.path().string().find("reference"), std::string::npos) << entry.path();
    }
  }
  // bfloat16 rounds the same parameters.
  auto o = whole(folder, "narrow");
  o.precision = "bf16";
  const Left narrow = left_by_ranks(1, o);
  for (const char* parallel : {"ddp", "fsdp"}) {
    o.output_dir = folder / ("narrow offload " + std::string(parallel));
    o.reference = "offload";
    o.parallel = parallel;
    EXPECT_EQ(left_by_ranks(2, o), narrow) << parallel;
  }
}

TEST(DividedRun, GoesOnWithItsReferenceInAnotherPlace) {
  const Folder folder;
  const Left undisturbed = left_by_ranks(1, whole(folder, "undisturbed"));
  for (const bool begins_in_files : {true, false}) {
    auto o = whole(folder, begins_in_files ? "from files" : "to files");
    o.resume = true;
    o.reference = begins_in_files ? "offload" : "resident";
    const auto statuses = spawn(2,
                                [&](World& world) {
                                  if (world.rank() == 1) worlds_left = 37;
                                  rl::run_continual(world, course(), o);
                                },
                                {.doomed = {0, 1}});
    ASSERT_TRUE(WIFSIGNALED(statuses[1]) && WTERMSIG(statuses[1]) == SIGKILL) << statuses[1];
    o.reference = begins_in_files ? "resident" : "offload";
    EXPECT_EQ(left_by_ranks(1, o), undisturbed) << begins_in_files;
  }
}

TEST(DividedRun, RefusesAReferenceWhereThereCanBeNone) {
  const Folder folder;
  const auto said = [&](auto change) {
    auto o = whole(folder, "run");
    change(o);
    return message_of<ConfigError>([&] { o.check(); });
  };
  EXPECT_THAT(said([](RunOptions& o) { o.reference = "shard"; }),
              HasSubstr("--reference shard needs --parallel fsdp"));
  EXPECT_THAT(said([](RunOptions& o) { o.reference = "moon"; }),
              HasSubstr("--reference moon has to be auto, resident, offload or shard"));
  EXPECT_THAT(said([](RunOptions& o) {
                o.reference = "offload";
                o.beta = 0;
              }),
              HasSubstr("--reference offload: without GRPO, or with --beta 0, there is none"));
}

TEST(DividedRun, GoesOnAsOneThatIsNotAndTheOtherWay) {
  const Folder folder;
  const Left undisturbed = left_by_ranks(1, whole(folder, "undisturbed"));
  for (const char* killed : {"ddp", "fsdp"}) {
    auto o = whole(folder, killed);
    o.resume = true;
    o.parallel = killed;
    const auto statuses = spawn(2,
                                [&](World& world) {
                                  // In the evaluation between the stages.
                                  if (world.rank() == 1) worlds_left = 37;
                                  rl::run_continual(world, course(), o);
                                },
                                {.doomed = {0, 1}});
    ASSERT_TRUE(WIFSIGNALED(statuses[1]) && WTERMSIG(statuses[1]) == SIGKILL) << statuses[1];
    o.parallel = o.parallel == "ddp" ? "fsdp" : "ddp";
    EXPECT_EQ(left_by_ranks(3, o), undisturbed) << killed;
  }
}

TEST(DividedRun, DoesNotGoOnInAnotherPrecision) {
  const Folder folder;
  isolated([&] {
    auto o = divided(folder, "run");
    o.iterations = 1;
    o.order = {"even"};
    rl::run_continual(World::solo(), course(), o);
    o.resume = true;
    const auto said = [&] {
      return message_of<ConfigError>([&] { rl::run_continual(World::solo(), course(), o); });
    };
    o.precision = "bf16";
    EXPECT_THAT(said(), HasSubstr("has another run; here: --precision bf16"));
    o.precision = "fp8";
    EXPECT_THAT(said(), HasSubstr("--precision fp8 has to be fp32 or bf16"));
    o.precision = "fp32";
    o.parallel = "pipeline";
    EXPECT_THAT(said(), HasSubstr("--parallel pipeline has to be ddp or fsdp"));
  });
}

}  // namespace
}  // namespace lockstep::test
