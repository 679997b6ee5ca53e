// Files and flags of `accelerate launch`.
#include "launch/options/accelerate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "launch/job.h"
#include "lockstep/core/error.h"
#include "support/folder.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

// As `accelerate config` writes it for two machines.
constexpr const char* kTwoMachines = R"(compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29501
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
)";

void expect_accelerate_refuses(const std::string& text, const std::string& reason) {
  try {
    parse_accelerate(text, "f.yaml").flags();
    ADD_FAILURE() << "not refused: " << text;
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr(reason));
  }
}

TEST(Accelerate, AFileGivesTheFlagsOfTheSameJob) {
  const Accelerate settings = parse_accelerate(kTwoMachines, "f.yaml");
  EXPECT_THAT(
      settings.flags(),
      UnorderedElementsAre(Pair("--nproc-per-node", "4"), Pair("--nnodes", "2"),
                           Pair("--node-rank", "1"), Pair("--master-addr", "10.0.0.1"),
                           Pair("--master-port", "29501"), Pair("--rdzv-backend", "static")));
  EXPECT_THAT(settings.environment(),
              UnorderedElementsAre(Pair("ACCELERATE_MIXED_PRECISION", "bf16"),
                                   Pair("ACCELERATE_USE_CPU", "True")));
  EXPECT_THAT(settings.remarks, IsEmpty());
}

TEST(Accelerate, JsonIsReadTheSameWay) {
  const auto settings = parse_accelerate(
      R"({"distributed_type": "NO", "num_processes": 3, "use_cpu": true, "mixed_precision": "no"})",
      "default_config.yaml");
  EXPECT_THAT(settings.flags(), UnorderedElementsAre(Pair("--nproc-per-node", "3")));
}

TEST(Accelerate, FsdpSettingsAreReadWithAndWithoutTheirPrefix) {
  const auto settings = parse_accelerate(
      "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  sharding_strategy: 2\n"
      "  fsdp_offload_params: true\n  fsdp_transformer_layer_cls_to_wrap: Block\n"
      "  min_num_params: 1000\n",
      "f.yaml");
  const auto environment = settings.environment();
  EXPECT_THAT(environment, Contains(Pair("ACCELERATE_USE_FSDP", "true")));
  EXPECT_THAT(environment, Contains(Pair("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP")));
  EXPECT_THAT(environment, Contains(Pair("FSDP_OFFLOAD_PARAMS", "true")));
  EXPECT_THAT(environment, Contains(Pair("FSDP_TRANSFORMER_CLS_TO_WRAP", "Block")));
  EXPECT_THAT(environment, Contains(Pair("FSDP_MIN_NUM_PARAMS", "1000")));
}

TEST(Accelerate, UnknownKeysAreRefusedAtEveryDepth) {
  expect_accelerate_refuses("num_proceses: 2\n",
                            "[accelerate] f.yaml:1: unknown key 'num_proceses'; the nearest is "
                            "num_processes");
  // accelerate itself overlooks this one.
  expect_accelerate_refuses("num_processes: 2\nfsdp_config:\n  fsdp_offload_parms: true\n",
                            "f.yaml:3: unknown key 'fsdp_offload_parms'; the nearest is "
                            "offload_params");
}

TEST(Accelerate, IntelsExtensionIsKnownAndOnlyOffIsSilent) {
  // As `accelerate config` writes it where there is no GPU.
  const char* off = "distributed_type: MULTI_CPU\nipex_config:\n  ipex: false\nnum_processes: 2\n";
  EXPECT_THAT(parse_accelerate(off, "f.yaml").remarks, IsEmpty());
  EXPECT_THAT(parse_accelerate("ipex_config: {}\n", "f.yaml").remarks, IsEmpty());
  EXPECT_THAT(parse_accelerate("ipex_config:\n  ipex: true\n  use_xpu: false\n", "f.yaml").remarks,
              ElementsAre(HasSubstr("f.yaml:2: ipex has no effect: Intel's extension")));
  expect_accelerate_refuses("ipex_config:\n  ipx: true\n",
                            "unknown key 'ipx'; the nearest is ipex");
}

TEST(Accelerate, ValuesAreChecked) {
  expect_accelerate_refuses("num_processes: two\n", "'two' is not a whole number");
  expect_accelerate_refuses("num_processes: [2]\n", "num_processes has to be a text");
  expect_accelerate_refuses("num_processes: 0\n", "need 1 or more");
  expect_accelerate_refuses("mixed_precision: fp15\n", "'fp15' is none of no, fp16, bf16");
  expect_accelerate_refuses("mixed_precision: fp8\n", "'fp8' is none of no, fp16, bf16");
  expect_accelerate_refuses("use_cpu: maybe\n", "'maybe' is neither true nor false");
  expect_accelerate_refuses("distributed_type: DEEPSPEED\n", "is none of NO, MULTI_CPU, MULTI_GPU");
  expect_accelerate_refuses("num_processes: 3\nnum_machines: 2\nmain_process_ip: x\n",
                            "num_processes 3 over num_machines 2");
  expect_accelerate_refuses("num_processes: 4\nnum_machines: 2\n", "needs main_process_ip");
  expect_accelerate_refuses("distributed_type: MULTI_CPU\n", "needs num_processes");
  expect_accelerate_refuses("deepspeed_config:\n  zero_stage: 2\n",
                            "deepspeed_config is not supported");
  expect_accelerate_refuses("tpu_use_cluster: true\n", "it is about TPUs");
}

TEST(Accelerate, WhatIsOffIsNotRefused) {
  const auto settings = parse_accelerate(
      "distributed_type: no\nmixed_precision: NO\nnum_processes: 2\ndeepspeed_config: no\n"
      "dynamo_config:\n  dynamo_backend: 'NO'\n  dynamo_mode: default\ntpu_use_cluster: NO\n",
      "f.yaml");
  EXPECT_EQ(settings.distributed_type, "NO");
  EXPECT_EQ(settings.mixed_precision, "no");
  // The same words as in a file of a run.
  for (const std::string word : {"no", "false", "'off'", "None", "0"}) {
    EXPECT_NO_THROW(parse_accelerate("dynamo_config:\n  dynamo_backend: " + word + "\n", "f.yaml"));
  }
  expect_accelerate_refuses("dynamo_config:\n  dynamo_backend: INDUCTOR\n",
                            "dynamo_config is not supported");
}

// Each key of a file's section, and no list of them besides.
TEST(Accelerate, AKeyOfFsdpIsAFlag) {
  EXPECT_THAT(fsdp_keys(), Contains("sharding_strategy"));
  for (const std::string& key : fsdp_keys()) {
    const Result result = Job({"run", "--fsdp_" + key, "", "true"}).wait();
    EXPECT_EQ(result.exit_code, 0) << key << ": " << result.err;
  }
}

TEST(Accelerate, WhatIsNoYamlIsRefusedWithTheLine) {
  expect_accelerate_refuses("a: [1,\n", "f.yaml:");
  expect_accelerate_refuses("- 1\n- 2\n", "expected settings as KEY: VALUE lines");
  expect_accelerate_refuses(std::string(2 << 20, 'x'), "a configuration has at most");
}

TEST(Accelerate, AnEmptyFileSaysNothing) {
  EXPECT_THAT(parse_accelerate("", "f.yaml").flags(), IsEmpty());
}

class AccelerateJob : public ::testing::Test {
 protected:
  const test::Folder folder_{test::Folder::On::Disk};
  std::string file(const std::string& text) {
    std::ofstream(folder_ / "f.yaml") << text;
    return folder_ / "f.yaml";
  }
};

TEST_F(AccelerateJob, AConfigurationFileStartsTheJob) {
  const std::string path =
      file("distributed_type: MULTI_CPU\nnum_processes: 3\nmixed_precision: bf16\n");
  const Result result = Job({"run", "--config_file", path, "sh", "-c",
                             "echo $WORLD_SIZE $ACCELERATE_MIXED_PRECISION"})
                            .wait();
  EXPECT_EQ(lines_of(result.out).size(), 3u) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[rank 0] 3 bf16"));
}

TEST_F(AccelerateJob, FlagsAndVariablesWinOverTheFile) {
  const std::string path = file("distributed_type: MULTI_CPU\nnum_processes: 3\n");
  const auto count = [&](std::vector<std::string> flags, Settings settings = {}) {
    std::vector<std::string> args = {"run", "--config-file=" + path};
    args.insert(args.end(), flags.begin(), flags.end());
    args.insert(args.end(), {"echo", "x"});
    return lines_of(Job(args, settings).wait().out).size();
  };
  EXPECT_EQ(count({}), 3u);
  EXPECT_EQ(count({"--num_processes", "2"}), 2u);
  EXPECT_EQ(count({"--nproc-per-node", "4"}), 4u);
  EXPECT_EQ(count({}, {.environment = {{"PET_NPROC_PER_NODE", "5"}}}), 5u);
}

TEST_F(AccelerateJob, FlagsWinOverTheEnvironmentAndThatOverTheFile) {
  const Settings settings{.environment = {{"OMP_NUM_THREADS", "1"},
                                          {"CUDA_VISIBLE_DEVICES", "0"},
                                          {"ACCELERATE_MIXED_PRECISION", "fp16"},
                                          {"ACCELERATE_USE_CPU", "False"}}};
  const auto seen = [&](std::vector<std::string> flags) {
    std::vector<std::string> args = {"run"};
    args.insert(args.end(), flags.begin(), flags.end());
    args.insert(args.end(), {"sh", "-c",
                             "echo $OMP_NUM_THREADS $CUDA_VISIBLE_DEVICES "
                             "$ACCELERATE_MIXED_PRECISION $ACCELERATE_USE_CPU"});
    return Job(args, settings).wait().out;
  };
  EXPECT_EQ(seen({"--cpu", "--num_cpu_threads_per_process=4", "--gpu_ids=1",
                  "--mixed_precision=bf16", "--num_processes=1"}),
            "4 1 bf16 True\n");
  const std::string path = file("mixed_precision: bf16\nuse_cpu: true\ngpu_ids: 1\n");
  EXPECT_EQ(seen({"--config_file", path}), "1 0 fp16 False\n");
  EXPECT_EQ(seen({"--config_file", path, "--mixed_precision=no"}), "1 0 no False\n");
}

// ACCELERATE_MIXED_PRECISION is no where nothing was said, too.
TEST_F(AccelerateJob, RanksKnowWhetherNoWasSaid) {
  const auto seen = [](std::vector<std::string> args) {
    args.insert(args.begin(), {"run", "--num_processes=1"});
    args.insert(args.end(), {"sh", "-c", "echo said $LOCKSTEP_MIXED_PRECISION"});
    return Job(args).wait().out;
  };
  EXPECT_EQ(seen({"--mixed_precision=no"}), "said no\n");
  EXPECT_EQ(seen({"--mixed_precision=bf16"}), "said\n");
  EXPECT_EQ(seen({"--config_file", file("mixed_precision: 'no'\n")}), "said\n");
}

TEST_F(AccelerateJob, FlagsOfTheCommandLineWinOverTorchrunsVariables) {
  const Settings settings{.environment = {{"PET_NPROC_PER_NODE", "3"}}};
  EXPECT_EQ(lines_of(Job({"run", "--num_processes=2", "echo", "x"}, settings).wait().out).size(),
            2u);
}

TEST_F(AccelerateJob, FlagsOfBothThatContradictEachOtherAreRefused) {
  const auto run = [](std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"run"});
    flags.insert(flags.end(), {"echo", "x"});
    return Job(flags).wait();
  };
  const auto expect_refused = [&](const std::vector<std::string>& flags, const std::string& why) {
    const Result result = run(flags);
    EXPECT_EQ(result.exit_code, 2) << why;
    EXPECT_THAT(result.err, HasSubstr(why));
  };
  expect_refused({"--num_processes=2", "--nproc-per-node=4"},
                 "--nproc-per-node and --num-processes say different things about the same, 4 and "
                 "2: give one of them");
  expect_refused({"--machine_rank", "0", "--node-rank", "1"}, "--node-rank and --machine-rank");
  expect_refused({"--main_process_port", "3333", "--master-port", "4444"},
                 "--master-port and --main-process-port");
  expect_refused({"--main_process_ip=a", "--master-addr=b"}, "--master-addr and --main-process-ip");
  // --num_processes counts the ranks of all hosts.
  expect_refused({"--num_processes=4", "--num_machines=2", "--main_process_ip=x",
                  "--machine_rank=0", "--nproc-per-node=4"},
                 "the same, 4 and 2");
  EXPECT_EQ(lines_of(run({"--num_processes=2", "--nproc_per_node=2"}).out).size(), 2u);
}

TEST_F(AccelerateJob, ItsFlagsHaveVariablesToo) {
  const Result result = Job({"run", "sh", "-c", "echo $WORLD_SIZE $ACCELERATE_USE_CPU"},
                            {.environment = {{"PET_NUM_PROCESSES", "2"}, {"PET_CPU", "1"}}})
                            .wait();
  EXPECT_THAT(result.out, HasSubstr("[rank 1] 2 True")) << result.err;
  EXPECT_THAT(
      Job({"run", "true"}, {.environment = {{"PET_CONFIG_FILE", "/no/such.yaml"}}}).wait().err,
      HasSubstr("--config_file /no/such.yaml: No such file"));
}

TEST_F(AccelerateJob, PrintEnvShowsItsVariables) {
  EXPECT_THAT(Job({"run", "--mixed_precision=bf16", "--print-env", "true"},
                  {.environment = {{"ACCELERATE_MIXED_PRECISION", "fp16"}}})
                  .wait()
                  .out,
              HasSubstr("rank 0: ACCELERATE_MIXED_PRECISION=bf16\n"));
}

TEST_F(AccelerateJob, ItsFlagsWorkWithoutAFile) {
  const Result result = Job({"run", "--cpu", "--num_processes=2", "--num_cpu_threads_per_process=3",
                             "--mixed_precision=fp16", "sh", "-c",
                             "echo $WORLD_SIZE $OMP_NUM_THREADS $ACCELERATE_MIXED_PRECISION"},
                            {.environment = {{"OMP_NUM_THREADS", ""}}})
                            .wait();
  EXPECT_THAT(result.out, HasSubstr("[rank 1] 2 3 fp16")) << result.err;
}

TEST_F(AccelerateJob, FlagsOfFsdpAreThoseOfTheFile) {
  const auto run = [](std::vector<std::string> flags, Settings settings = {}) {
    flags.insert(flags.begin(), {"run", "--num_processes=1"});
    flags.insert(flags.end(), {"sh", "-c",
                               "echo $ACCELERATE_USE_FSDP $FSDP_SHARDING_STRATEGY "
                               "$FSDP_TRANSFORMER_CLS_TO_WRAP $FSDP_OFFLOAD_PARAMS"});
    return Job(flags, settings).wait();
  };
  EXPECT_EQ(run({"--use_fsdp", "--fsdp_sharding_strategy", "2",
                 "--fsdp_transformer_layer_cls_to_wrap=Block", "--fsdp-offload-params=True"})
                .out,
            "true SHARD_GRAD_OP Block true\n");
  // Over the file and the environment.
  const std::string path = file(
      "distributed_type: FSDP\nnum_processes: 1\nfsdp_config:\n  fsdp_offload_params: true\n"
      "  fsdp_sharding_strategy: NO_SHARD\n  transformer_layer_cls_to_wrap: [Block, Layer]\n");
  EXPECT_EQ(run({"--config_file", path, "--fsdp_sharding_strategy=FULL_SHARD"},
                {.environment = {{"FSDP_SHARDING_STRATEGY", "HYBRID_SHARD"}}})
                .out,
            "true FULL_SHARD Block,Layer true\n");
  const Result wrong = run({"--use_fsdp", "--fsdp_sharding_strategy=FULL"});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("--fsdp_sharding_strategy: sharding_strategy: 'FULL' is none "
                                   "of FULL_SHARD"));
  const Result alone = run({"--fsdp_min_num_params=1000"});
  EXPECT_EQ(alone.exit_code, 2);
  EXPECT_THAT(alone.err, HasSubstr("--fsdp_min_num_params without --use_fsdp"));
}

TEST_F(AccelerateJob, DebugAndQuietAreKnown) {
  const auto run = [](const char* flag) {
    return Job({"run", flag, "sh", "-c", "echo x $ACCELERATE_DEBUG_MODE"}).wait().out;
  };
  EXPECT_EQ(run("--debug"), "x true\n");
  EXPECT_EQ(run("--quiet"), "x\n");
  EXPECT_EQ(run("-q"), "x\n");
}

TEST_F(AccelerateJob, AMissingFileIsNamed) {
  const Result result = Job({"run", "--config_file", "/no/such.yaml", "true"}).wait();
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("--config_file /no/such.yaml: No such file"));
}

}  // namespace
}  // namespace lockstep::launch::testing
