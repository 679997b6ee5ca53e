// Which runs divide their model.
#include "lockstep/plan/placement.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <string>

#include "lockstep/models/pretrained.h"
#include "support/folder.h"
#include "support/spawn.h"

namespace lockstep::plan {
namespace {

// A folder of transformers, as far as its sizes go.
std::string folder_of(const test::Folder& folder, const std::string& name, int64_t hidden) {
  std::filesystem::create_directories(folder / name);
  const std::string width = std::to_string(hidden);
  test::write(folder / (name + "/config.json"),
              R"({"model_type": "qwen3", "vocab_size": 500, "num_hidden_layers": 36,
              "intermediate_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": true,
              "hidden_size": )" +
                  width + "}");
  return folder / name;
}

rl::RunOptions run_of(const std::string& model) {
  rl::RunOptions out = rl::model_preset();
  out.model = model;
  return out;
}

TEST(Placement, SizesAreThoseOfTheModel) {
  const models::TransformerOptions options{.vocabulary = 500,
                                           .layers = 3,
                                           .hidden = 64,
                                           .feed_forward = 160,
                                           .heads = 4,
                                           .kv_heads = 2,
                                           .head_dim = 24,
                                           .max_length = 96,
                                           .tied = false};
  const auto sizes = sizes_of(options);
  EXPECT_EQ(transformer_profile(sizes, 96, Precision::Float).elements(),
            models::parameter_count(options));
  EXPECT_EQ(cache_bytes_per_token(sizes), 3 * 2 * 2 * 24 * 2);
  EXPECT_EQ(sizes.max_length, 96);
}

TEST(Placement, ARankWritesAndLearnsFromWholeContextsOfALane) {
  auto run = run_of("a");  // 8 tasks an iteration, 2 episodes of each
  const train::TransformerConfig sizes{.max_length = 20'000};
  auto counted = grpo_options(run, sizes, 3);
  EXPECT_EQ(counted.update_batch, 6);
  EXPECT_EQ(counted.prompts * counted.group_size, 8) << "of 4 tasks, 4 each, in an evaluation";
  EXPECT_EQ(counted.prompt_tokens, 16'384 - 512);
  EXPECT_EQ(counted.new_tokens, 512);
  EXPECT_EQ(counted.reference, Reference::Resident);
  EXPECT_EQ(counted.precision, Precision::Float);
  run.lanes = 8;
  run.group_size = 100;
  run.beta = 0;
  run.precision = "bf16";
  counted = grpo_options(run, {.max_length = 1000}, 3);
  EXPECT_EQ(counted.update_batch, 100);
  EXPECT_EQ(counted.prompts, 64) << "roll_out() computes no more episodes together";
  EXPECT_EQ(counted.prompt_tokens, 1000 - 512);
  EXPECT_EQ(counted.reference, Reference::None);
  EXPECT_EQ(counted.precision, Precision::Narrow);
}

TEST(Placement, ARankWritesEvaluationsToo) {
  auto run = run_of("a");
  run.lanes = 2;
  run.tasks_per_domain = 100;  // 40 are for evaluation, 4 episodes of each
  const auto counted = grpo_options(run, {.max_length = 1000}, 2);
  EXPECT_EQ(counted.prompts, 64);
  EXPECT_EQ(counted.update_batch, 8);
  run.eval_tasks = 20;
  EXPECT_EQ(grpo_options(run, {.max_length = 1000}, 2).prompts, 40);
}

TEST(Placement, AModelThatFitsNoRankIsDivided) {
  const test::Folder folder;
  const auto small = folder_of(folder, "small", 64);
  const auto large = folder_of(folder, "large", 1 << 30);  // 2 TB of its embedding alone
  test::spawn(1, [&](World& world) {
    EXPECT_EQ(placement(run_of(large), world), "ddp") << "nobody to divide it with";
  });
  test::spawn(2, [&](World& world) {
    EXPECT_EQ(placement(rl::tiny_preset(), world), "ddp");
    EXPECT_EQ(placement(run_of(small), world), "ddp");
    EXPECT_EQ(placement(run_of(large), world), "fsdp");
    // As on hosts of which one has less memory, or has no such folder.
    for (const std::string& other : {large, folder / "none"}) {
      EXPECT_EQ(placement(run_of(world.rank() == 0 ? small : other), world), "fsdp");
    }
  });
}

}  // namespace
}  // namespace lockstep::plan
