// `lockstep plan`.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "support/folder.h"
#include "support/tool.h"

namespace lockstep::plan {
namespace {

using test::lockstep_tool;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

class PlanCommand : public testing::Test {
 protected:
  PlanCommand() {
    std::ofstream(folder_ / "run.yaml")
        << "model: {kind: mlp, hidden: [256]}\ndata: fashion-mnist\n";
    run_ = folder_ / "run.yaml";
  }

  const test::Folder folder_;
  std::string run_;
};

TEST_F(PlanCommand, AFileIsPlannedInWordsAndForPrograms) {
  const auto words = lockstep_tool("plan " + run_ + " --ranks 2");
  EXPECT_EQ(words.status, 0) << words.said;
  EXPECT_THAT(words.said,
              AllOf(StartsWith("mlp, 784 - 256 - 10: 204 k parameters"), HasSubstr("Use Ddp")));
  const auto json = lockstep_tool("plan " + run_ + " --ranks 2 --json");
  const auto plan = nlohmann::json::parse(json.said);
  EXPECT_EQ(plan.at("ranks"), 2);
  EXPECT_EQ(plan.at("best").at("strategy"), "Ddp");
  EXPECT_EQ(plan.at("parameters"), 203530);
}

TEST_F(PlanCommand, TheKnownDevicesAreAnObjectToo) {
  const auto known = nlohmann::json::parse(lockstep_tool("plan --devices --json").said);
  EXPECT_EQ(known.at("devices").at(0).at("name"), "t4");
  EXPECT_GT(known.at("networks").at(0).at("node_bandwidth"), 0);
}

TEST_F(PlanCommand, RanksAreThoseOfAllHostsOfTheFile) {
  const auto ranks = [&](const std::string& more) {
    const auto out = lockstep_tool("plan " + run_ + " --json --devices-per-node 4 " + more);
    return nlohmann::json::parse(out.said).at("ranks").get<int>();
  };
  EXPECT_EQ(ranks(""), 4);
  EXPECT_EQ(ranks("--set launch.nproc_per_node=2 --set launch.nnodes=3"), 6);
  EXPECT_EQ(ranks("--set num_processes=6 --set num_machines=3"), 6);
  EXPECT_EQ(ranks("--set launch.nnodes=2:4"), 8);
  EXPECT_EQ(ranks("--set launch.nproc_per_node=auto --ranks 3"), 3);
}

// As many ranks as the file starts on a host have its memory together, and its cores.
TEST_F(PlanCommand, HostsHaveAsManyRanksAsTheFileStarts) {
  const auto planned = [&](const std::string& more) {
    return nlohmann::json::parse(lockstep_tool("plan " + run_ + " --json " + more).said);
  };
  const auto memory_of = [](const nlohmann::json& plan) {
    return plan.at("strategies").at(0).at("memory_bytes").at("available").get<double>();
  };
  const auto computation_of = [](const nlohmann::json& plan) {
    return plan.at("strategies").at(0).at("step_seconds").at("computation").get<double>();
  };
  const int64_t cores = planned("").at("devices_per_node");
  const double host = memory_of(planned("--ranks 1"));
  const auto more = planned(fmt::format("--set launch.nproc_per_node={}", 4 * cores));
  EXPECT_EQ(more.at("devices_per_node"), 4 * cores);
  EXPECT_DOUBLE_EQ(memory_of(more), host / static_cast<double>(4 * cores));
  EXPECT_DOUBLE_EQ(computation_of(more), 4 * computation_of(planned("")));
  EXPECT_EQ(more.at("strategies").size(), 4) << "no hybrid on one host";
  const auto two = planned("--set launch.nproc_per_node=1 --set launch.nnodes=2");
  EXPECT_EQ(two.at("ranks"), 2);
  EXPECT_EQ(two.at("devices_per_node"), 1);
  EXPECT_DOUBLE_EQ(memory_of(two), host);
  EXPECT_DOUBLE_EQ(computation_of(two), computation_of(planned("")));
  EXPECT_EQ(planned("--set launch.nproc_per_node=4 --devices-per-node 2").at("devices_per_node"),
            2);
  EXPECT_EQ(planned("--set launch.nproc_per_node=4 --ranks 3").at("devices_per_node"), cores);
}

TEST_F(PlanCommand, OneIsNotSeveral) {
  const auto out =
      lockstep_tool("simulate " + run_ + " --ranks 1 --steps 1 --failure-hours 1000000");
  EXPECT_EQ(out.status, 0) << out.said;
  EXPECT_THAT(out.said, AllOf(HasSubstr("on 1 rank of cpu"), HasSubstr(" a step over 1 step\n")));
}

TEST_F(PlanCommand, WrongArgumentsSayWhatWouldBeRight) {
  const auto said = [](const std::string& arguments) {
    const auto out = lockstep_tool(arguments);
    EXPECT_EQ(out.status, 2) << out.said;
    return out.said;
  };
  EXPECT_THAT(said("plan"), HasSubstr("say what to plan"));
  EXPECT_THAT(said("plan " + run_ + " --bathc 3"),
              HasSubstr("--bathc; the nearest is --batch (lockstep plan --help)"));
  EXPECT_THAT(said("plan " + run_ + " --epochs 3"),
              HasSubstr("--epochs: write --set training.epochs=3 (lockstep plan --help)"));
  EXPECT_THAT(said("report --compre"), HasSubstr("RUN is required; unknown flag --compre; the "
                                                 "nearest is --compare (lockstep report --help)"));
  EXPECT_THAT(said("config show"), HasSubstr("FILE is required (lockstep config show --help)"));
  EXPECT_THAT(said("plan " + run_ + " --device h100-smx"), HasSubstr("the nearest is h100-sxm"));
  EXPECT_THAT(said("plan --model qwen3-5b"), HasSubstr("the nearest is qwen3-"));
  EXPECT_THAT(said("plan " + run_ + " --ranks 0x"), HasSubstr("--ranks"));
  EXPECT_THAT(said("plan " + run_ + " --machine /nowhere"),
              HasSubstr("lockstep bench --to /nowhere"));
  EXPECT_THAT(said("plan " + run_ + " --machine /tmp"), HasSubstr("/tmp: it is a directory"));
  for (const std::string flag :
       {"--ranks", "--devices-per-node", "--batch", "--tokens", "--outputs", "--measured-step"}) {
    EXPECT_THAT(said("plan " + run_ + " " + flag + " 0"), HasSubstr(flag + ": '0': give"));
  }
  EXPECT_THAT(said("plan " + run_ + " --tokens 9"), HasSubstr("model.kind mlp takes no texts"));
  EXPECT_THAT(said("plan --model qwen3-0.6b --sample 3x32"), HasSubstr("does not read --sample"));
  EXPECT_THAT(said("plan --model qwen3-0.6b --outputs 3"), HasSubstr("does not read --outputs"));
  EXPECT_THAT(said("plan " + run_ + " --sample 4294967296x4294967296x3"), HasSubstr("at most"));
  EXPECT_THAT(said("plan --model qwen3-4b --grpo --group-size 9007199254740993"),
              HasSubstr("--group-size: '9007199254740993': give"));
  EXPECT_THAT(said("simulate " + run_ + " --ranks 3 --devices-per-node 2 --strategy fsdp-hybrid"),
              HasSubstr("give full nodes of 2"));
  EXPECT_THAT(said("plan " + run_ + " --reference none"), HasSubstr("--reference requires --grpo"));
  EXPECT_THAT(said("simulate " + run_ + " --traced-ranks 2"), HasSubstr("requires --trace"));
  EXPECT_THAT(said("simulate " + run_ + " --save-every 0"), HasSubstr("--save-every: '0': give"));
  EXPECT_THAT(said("plan " + run_ + " --set data.kind=csv --set data.path=x.csv"),
              HasSubstr("--sample"));
  EXPECT_THAT(said("plan " + run_ + " --grpo"), HasSubstr("needs a transformer"));
  for (const std::string flag : {"--batch 2", "--tokens 9", "--ranks 2", "--sample 3",
                                 "--outputs 2", "--measured-step 1", "--bf16", "--recompute"}) {
    EXPECT_THAT(said("plan --model qwen3-0.6b --grpo " + flag),
                HasSubstr("--grpo does not read " + flag.substr(0, flag.find(' ')) + ": "));
  }
  EXPECT_THAT(said("simulate " + run_ + " --strategy fsdq"), HasSubstr("the nearest is fsdp"));
  EXPECT_THAT(said("plan " + run_ + " --measured-step nan"), HasSubstr("--measured-step"));
  EXPECT_THAT(said("simulate " + run_ + " --work-hours inf"), HasSubstr("inf is not a time"));
  EXPECT_THAT(said("simulate " + run_ + " --save-every 1e-9"), HasSubstr("checkpoints in"));
  // The best interval is as short.
  for (const std::string flags :
       {"--save-seconds 1e-12 --work-hours 1e6", "--save-seconds 1e-300", "--work-hours 1e12",
        "--failure-hours 1e300 --work-hours 1e300 --save-seconds 1"}) {
    EXPECT_THAT(said("simulate " + run_ + " --ranks 2 " + flags), HasSubstr("checkpoints in"));
  }
  for (const std::string flag : {"--failure-hours", "--save-seconds", "--work-hours"}) {
    EXPECT_THAT(said("simulate " + run_ + " " + flag + " 0"), HasSubstr(flag + ": 0 is not a"));
  }
  EXPECT_THAT(said("simulate " + run_ + " --restart-seconds -1"),
              HasSubstr("--restart-seconds: -1 is not a time"));
  EXPECT_THAT(said("simulate " + run_ + " --slow-ranks 1 --slow-factor inf"),
              HasSubstr("inf times as slow"));
  for (const std::string command : {"plan ", "simulate "}) {
    EXPECT_THAT(said(command + run_ + " --set parallel.lanes=8 --ranks 16"),
                HasSubstr("parallel.lanes = 8 on 16 ranks"));
  }
}

// A run computes in bfloat16 where the device multiplies it, and so it is planned.
TEST_F(PlanCommand, AutomaticPrecisionIsTheDevices) {
  for (const std::string command : {"plan ", "simulate --ranks 2 "}) {
    const auto on = [&](const std::string& device, const char* dtype) {
      return lockstep_tool(command + run_ + " --json --device " + device +
                           " --set mixed_precision=" + dtype)
          .said;
    };
    EXPECT_EQ(on("h100-sxm", "auto"), on("h100-sxm", "bf16"));
    EXPECT_NE(on("h100-sxm", "auto"), on("h100-sxm", "no"));
    for (const std::string old : {"t4", "v100-sxm2-16gb", "v100-sxm2-32gb"}) {
      EXPECT_EQ(on(old, "auto"), on(old, "no"));
      EXPECT_NE(on(old, "auto"), on(old, "fp16"));
    }
  }
}

TEST_F(PlanCommand, NothingFitsIsAStatusOfItsOwn) {
  const auto out = lockstep_tool("plan --model qwen3-32b --device t4 --ranks 2");
  EXPECT_EQ(out.status, 3);
  EXPECT_THAT(out.said, HasSubstr("Nothing fits on 2 ranks"));
}

// Longer than stdout's buffer, so that writing fails before the end.
TEST_F(PlanCommand, AFullDiskIsSaidOfLongOutputsToo) {
  for (const std::string& command : {"plan " + run_ + " --json", std::string("config reference")}) {
    const auto out =
        test::shell(fmt::format("{}/bin/lockstep {} > /dev/full", LOCKSTEP_BINARY_DIR, command));
    EXPECT_EQ(out.status, 1);
    EXPECT_THAT(out.said, HasSubstr("] stdout cannot be written: No space left on device"));
  }
}

TEST_F(PlanCommand, SimulateWritesItsTimeline) {
  const auto trace = folder_ / "trace.json";
  const auto out = lockstep_tool("simulate " + run_ + " --ranks 4 --json --trace " + trace);
  EXPECT_EQ(out.status, 0) << out.said;
  EXPECT_EQ(nlohmann::json::parse(out.said).at("steps").size(), 3);
  EXPECT_TRUE(nlohmann::json::parse(std::ifstream(trace)).contains("traceEvents"));
  // Of long runs it would not fit the memory.
  for (const std::string flags : {"--steps 100000", "--ranks 1000000 --traced-ranks 1000000"}) {
    const auto long_one = lockstep_tool("simulate " + run_ + " " + flags + " --trace " + trace);
    EXPECT_EQ(long_one.status, 2) << long_one.said;
    EXPECT_THAT(long_one.said, AllOf(HasSubstr("a timeline of"), HasSubstr("for at most 1000000")));
  }
}

}  // namespace
}  // namespace lockstep::plan
