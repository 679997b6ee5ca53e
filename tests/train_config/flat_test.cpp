// Files as people have them: keys of the transformers Trainer, accelerate and PyTorch's DDP.
#include <gmock/gmock.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/train/config.h"
#include "train_config/read.h"

namespace lockstep::train {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(FlatKeys, AWholeFile) {
  const auto config = read(R"(
batch_size: 32
gradient_accumulation_steps: 4
learning_rate: 0.1
use_linear_scaling: true
num_train_epochs: 3
max_steps: -1
max_grad_norm: 1.0
logging_steps: 10
save_strategy: steps
save_steps: 100
save_total_limit: 2
resume_from_checkpoint: checkpoint-latest
output_dir: runs/a
seed: 42
use_sync_bn: true
sync_bn_group_size: 2
bucket_cap_mb: 10
broadcast_buffers: true
optim: sgd
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
)");
  EXPECT_EQ(config.training.batch_size, 32);
  EXPECT_EQ(config.training.gradient_accumulation_steps, 4);
  EXPECT_EQ(config.optimizer.lr_scaling, "linear");
  EXPECT_EQ(config.training.epochs, 3);
  EXPECT_EQ(config.training.max_steps, 0);
  EXPECT_EQ(config.checkpoint.save_steps, 100);
  EXPECT_EQ(config.checkpoint.save_total_limit, 2);
  EXPECT_EQ(config.checkpoint.resume, "latest");
  EXPECT_TRUE(config.parallel.sync_bn);
  EXPECT_EQ(config.parallel.sync_bn_group_size, 2);
  EXPECT_EQ(config.parallel.bucket_cap_mb, 10);
  EXPECT_EQ(config.parallel.buffers, "broadcast");
  EXPECT_EQ(config.optimizer.kind, "sgd");
  EXPECT_EQ(config.schedule.kind, "cosine");
  EXPECT_EQ(config.mixed_precision.dtype, "bf16");
  EXPECT_THAT(config.remarks, ElementsAre(HasSubstr("run.yaml:5:1: use_linear_scaling means x N")));
  EXPECT_EQ(config.origins.at("optimizer.lr_scaling"), "run.yaml:5:1");
}

TEST(FlatKeys, NamesOfMetricsMayHaveThePrefixOfTheTransformersTrainer) {
  for (const char* name : {"eval_loss", "loss"}) {
    const auto config = read(std::string("output_dir: runs/a\nload_best_model_at_end: true\n") +
                             "metric_for_best_model: " + name + "\n");
    EXPECT_EQ(config.checkpoint.best_metric, "loss") << name;
  }
}

TEST(FlatKeys, ResumeInAllItsForms) {
  for (const auto& [text, meant] : std::vector<std::pair<std::string, std::string>>{
           {"true", "latest"},
           {"latest", "latest"},
           {"false", ""},
           {"none", ""},
           {"checkpoint-latest", "latest"},
           {"runs/a/step-00000010", "runs/a/step-00000010"}}) {
    EXPECT_EQ(read("output_dir: x\nresume_from_checkpoint: " + text).checkpoint.resume, meant)
        << text;
  }
  EXPECT_EQ(read("output_dir: x\ncheckpoint: {resume: true}").checkpoint.resume, "latest");
  EXPECT_EQ(read("output_dir: x\ncheckpoint: {resume: false}").checkpoint.resume, "");
}

TEST(FlatKeys, WhatIsNotNeededIsAcceptedAndAnsweredOnce) {
  const auto config =
      read("find_unused_parameters: false\ngradient_as_bucket_view: true\nstatic_graph: true\n");
  EXPECT_THAT(config.remarks,
              ElementsAre(HasSubstr("run.yaml:1:1: find_unused_parameters has no effect"),
                          HasSubstr("run.yaml:2:1: gradient_as_bucket_view has no effect"),
                          HasSubstr("run.yaml:3:1: static_graph has no effect")));
  EXPECT_TRUE(config.origins.empty());
}

TEST(FlatKeys, WhatAFileOfTheTransformersTrainerUsuallyHas) {
  const auto config = read(
      "output_dir: o\nreport_to: [tensorboard, wandb]\noverwrite_output_dir: true\n"
      "logging_dir: l\npush_to_hub: false\ndataloader_pin_memory: true\n"
      "load_best_model_at_end: true\n");
  EXPECT_TRUE(config.logging.tensorboard);
  EXPECT_TRUE(config.checkpoint.restore_best);
  EXPECT_EQ(config.checkpoint.best_metric, "loss");
  EXPECT_THAT(config.origins.at("checkpoint.best_metric"),
              HasSubstr("because of load_best_model_at_end in run.yaml:7"));
  EXPECT_THAT(config.remarks, ElementsAre(HasSubstr("report_to wandb has no effect"),
                                          HasSubstr("overwrite_output_dir has no effect"),
                                          HasSubstr("logging_dir has no effect"),
                                          HasSubstr("dataloader_pin_memory has no effect")));
  EXPECT_FALSE(read("report_to: none").logging.tensorboard);
  EXPECT_EQ(read("output_dir: o\nload_best_model_at_end: true\nmetric_for_best_model: accuracy\n"
                 "metrics: [accuracy]")
                .checkpoint.best_metric,
            "accuracy");
  EXPECT_THAT(refusal("push_to_hub: true"), HasSubstr("nothing is uploaded"));
  EXPECT_THAT(refusal("output_dir: o\ncheckpoint: {restore_best: true}"),
              HasSubstr("needs checkpoint.best_metric"));
}

TEST(FlatKeys, AFalseThatWasANo) {
  EXPECT_EQ(read("save_strategy: false").checkpoint.save_strategy, "no");
  EXPECT_EQ(read("eval_strategy: no\nmixed_precision: False").mixed_precision.dtype, "no");
  EXPECT_THAT(refusal("loss: false"), HasSubstr("'false' is not one of auto"));
}

TEST(FlatKeys, TwoThatContradictEachOtherAreAnError) {
  EXPECT_EQ(refusal("batch_size: 3\ntraining: {batch_size: 4}\n"),
            "[config] run.yaml:2:12: batch_size says something else than batch_size in "
            "run.yaml:1:1: give one of them");
  EXPECT_THAT(refusal("sync_bn: true\nuse_sync_bn: false\n"), HasSubstr("else than sync_bn"));
  EXPECT_THAT(refusal("bf16: true\nfp16: true\n"), HasSubstr("fp16 says something else than bf16"));
  EXPECT_TRUE(read("sync_bn: true\nuse_sync_bn: true\n").parallel.sync_bn);
}

TEST(FlatKeys, WhatCannotBeHonouredIsRefusedByName) {
  EXPECT_THAT(refusal("deepspeed_config: {zero_stage: 2}"), HasSubstr("no such engine"));
  EXPECT_THAT(refusal("dynamo_config: {dynamo_backend: inductor}"), HasSubstr("no such engine"));
  EXPECT_THAT(refusal("use_linear_scaling: maybe"), HasSubstr("'maybe' is not true or false"));
  EXPECT_THAT(refusal("optim: adafactor"), HasSubstr("'adafactor' is none of adam"));
  EXPECT_THAT(refusal("gpu_ids: 0,1"), HasSubstr("set CUDA_VISIBLE_DEVICES"));
  EXPECT_THAT(refusal("compute_environment: AMAZON_SAGEMAKER"), HasSubstr("only LOCAL_MACHINE"));
  read("gradient_checkpointing: false\ndeepspeed_config: {}\ngpu_ids: all\n");
  read("dynamo_config: {dynamo_backend: 'NO', dynamo_mode: default}\ndistributed_type: no\n");
}

TEST(FlatKeys, AccelerateFiles) {
  const auto config = read(R"(
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29501
main_training_function: main
mixed_precision: 'no'
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
use_cpu: true
)");
  EXPECT_EQ(config.launch.nproc_per_node, "4");
  EXPECT_EQ(config.launch.nnodes, "2");
  EXPECT_EQ(config.launch.node_rank, 1);
  EXPECT_EQ(config.launch.master_addr, "10.0.0.1");
  EXPECT_EQ(config.parallel.device, "cpu");
  EXPECT_EQ(config.mixed_precision.dtype, "no");
  EXPECT_THAT(refusal("num_processes: 3\nnum_machines: 2"),
              HasSubstr("run.yaml:1:16: num_processes: 3 over num_machines 2"));
  EXPECT_THAT(refusal("num_processes: two"), HasSubstr("run.yaml:1:16: num_processes: 'two'"));
}

TEST(FsdpKeys, WithOrWithoutThePrefixAreRead) {
  const auto config = read(
      "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 2\n  cpu_offload: false\n"
      "  backward_prefetch: NO_PREFETCH\n  fsdp_forward_prefetch: true\n  offload_folder: "
      "/scratch\n"
      "lanes: 4\n");
  EXPECT_EQ(config.parallel.fsdp.offload_folder, "/scratch");
  EXPECT_EQ(config.parallel.lanes, 4);
  EXPECT_EQ(config.parallel.strategy, "fsdp");
  EXPECT_EQ(config.parallel.fsdp.sharding_strategy, "SHARD_GRAD_OP");
  EXPECT_EQ(config.parallel.fsdp.backward_prefetch, "NO_PREFETCH");
  EXPECT_TRUE(config.parallel.fsdp.forward_prefetch);
  EXPECT_THAT(config.remarks, testing::IsEmpty());
}

TEST(FsdpKeys, WhatChangesNothingIsSaidOnce) {
  const auto config = read(
      "distributed_type: FSDP\nfsdp_config:\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
      "  use_orig_params: false\n  sync_module_states: false\n  offload_params: true\n"
      "  min_num_params: 10\n");
  ASSERT_EQ(config.remarks.size(), 5U);
  EXPECT_THAT(config.remarks[0], HasSubstr("run.yaml:3:3: state_dict_type has no effect"));
  EXPECT_THAT(config.remarks[4], HasSubstr("means SIZE_BASED_WRAP"));
}

TEST(FsdpKeys, WhatCannotBeIsRefusedByName) {
  const auto expect = [](const std::string& keys, const std::string& text) {
    EXPECT_THAT(refusal("distributed_type: FSDP\n" + keys), HasSubstr(text));
  };
  expect("fsdp_config: {auto_wrap_policy: SIZE_BASED_WRAP}", "needs parallel.fsdp.min_num_params");
  expect("fsdp_config: {auto_wrap_policy: NO_WRAP, min_num_params: 3}",
         "needs parallel.fsdp.auto_wrap_policy: SIZE_BASED_WRAP");
  expect("fsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP}",
         "needs parallel.fsdp.transformer_layer_cls_to_wrap");
  expect("fsdp_config: {transformer_layer_cls_to_wrap: Block, min_num_params: 3}",
         "give one of them, or auto_wrap_policy");
  expect("fsdp_config: {auto_wrap_policy: NO_WRAP, activation_checkpointing: true}",
         "needs units: parallel.fsdp.auto_wrap_policy is NO_WRAP");
  expect("fsdp_config: {ignored_modules: head}", "ignored_modules: is not supported");
  expect("bucket_cap_mb: 4", "parallel.bucket_cap_mb: needs parallel.strategy: ddp");
}

TEST(FsdpKeys, WithoutFsdpAreErrorsAndNotIgnored) {
  const std::string text =
      refusal("fsdp_sharding_strategy: FULL_SHARD\nfsdp_config: {min_num_params: 1}\n");
  EXPECT_THAT(text, HasSubstr("run.yaml:1:1: parallel.fsdp.sharding_strategy: needs "
                              "parallel.strategy: fsdp, and that is ddp"));
  EXPECT_THAT(text, HasSubstr("run.yaml:2:15: parallel.fsdp.min_num_params: needs"));
}

TEST(FsdpKeys, WrongOnesAreNamed) {
  const std::string text = refusal(
      "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 7\n"
      "  fsdp_sharding_stratgy: 1\n  version: 3\n  backward_prefetch: maybe\n");
  EXPECT_THAT(text,
              HasSubstr("run.yaml:3:27: fsdp_sharding_strategy: '7' is not one of FULL_SHARD"));
  EXPECT_THAT(text, HasSubstr("run.yaml:4:3: unknown key 'fsdp_sharding_stratgy' in "
                              "parallel.fsdp; the nearest is sharding_strategy"));
  EXPECT_THAT(text, HasSubstr("run.yaml:5:12: version: '3' is neither 1 nor 2"));
  EXPECT_THAT(text, HasSubstr("run.yaml:6:22: backward_prefetch: 'maybe' is not one of"));
}

TEST(FsdpKeys, FromAcceleratesEnvironment) {
  setenv("ACCELERATE_USE_FSDP", "true", 1);
  setenv("FSDP_SHARDING_STRATEGY", "HALF_SHARD", 1);
  const std::string text = refusal("");
  unsetenv("ACCELERATE_USE_FSDP");
  unsetenv("FSDP_SHARDING_STRATEGY");
  EXPECT_THAT(text, HasSubstr("environment FSDP_SHARDING_STRATEGY=HALF_SHARD: "));
}

}  // namespace
}  // namespace lockstep::train
