// What a plan advises where nothing fits, and what it says beside its figures.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "lockstep/plan/plan.h"
#include "support/folder.h"
#include "support/tool.h"

namespace lockstep::plan {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

// Two layers of 100,000, whose states are nearly all that they need; 16 bits would need more.
train::RunConfig wide_perceptron(const char* dtype = "no") {
  return {.model = {.kind = "mlp", .mlp = {.hidden = {100000, 100000}}},
          .mixed_precision = {.dtype = dtype}};
}

Machine host(double gib, int64_t devices = 2) {
  Machine machine = this_host();
  machine.device.memory_bytes = gib * (1 << 30);
  machine.devices_per_node = devices;
  return machine;
}

Plan plan_of(const train::RunConfig& config, const train::RunConfig& narrow, const Machine& machine,
             const Training& training, int64_t ranks) {
  const SampleSizes sample = {{784}, 10};
  return make_plan(profile_of(config, sample), training, machine,
                   {.ranks = ranks, .narrow = profile_of(narrow, sample)});
}

Plan wide_plan(const Machine& machine, const Training& training = {.batch = 64}) {
  return plan_of(wide_perceptron(), wide_perceptron("bf16"), machine, training, 1);
}

// The words of a text, whatever its lines are.
std::string unwrapped(const Plan& plan) {
  std::string text = plan_text(plan, 100);
  std::ranges::replace(text, '\n', ' ');
  return text;
}

TEST(Advice, OnlyWhatLessensTheMemoryIsARemedy) {
  const auto sample = SampleSizes{{784}, 10};
  const auto on = [&](const char* dtype, Precision precision) {
    return memory_of(profile_of(wide_perceptron(dtype), sample),
                     {.batch = 64, .precision = precision}, Strategy::Ddp, host(20), 1)
        .total;
  };
  EXPECT_GT(on("bf16", Precision::Narrow), on("no", Precision::Float));
  const auto plan = wide_plan(host(20));
  ASSERT_EQ(plan.remedies.size(), 1);
  EXPECT_EQ(plan.remedies[0].change, "sgd instead of Adam (optimizer: sgd)");
  EXPECT_NEAR(plan.remedies[0].memory.total,
              plan.strategies[0].memory.total - 1.01 * plan.strategies[0].memory.optimizer, 1e6);
  EXPECT_THAT(unwrapped(plan),
              AllOf(HasSubstr("most of it for the optimizer's state. Less is needed with sgd "
                              "instead of Adam (optimizer: sgd): 76 GiB. Otherwise take a "
                              "smaller model or a host with more memory."),
                    Not(HasSubstr("16 bits")), Not(HasSubstr("batch_size"))));
}

TEST(Advice, WhatMakesItFitSaysSo) {
  EXPECT_THAT(unwrapped(wide_plan(host(100))),
              HasSubstr("It would fit with sgd instead of Adam (optimizer: sgd): 76 GiB. "));
  EXPECT_THAT(unwrapped(wide_plan(host(100), {.batch = 64, .state_bytes = 4})),
              HasSubstr("It would fit with sgd without momentum (optimizer.momentum: 0): 76"));
  EXPECT_TRUE(wide_plan(host(200)).remedies.empty()) << "it fits";
}

TEST(Advice, WithoutARemedyItSaysWhatIsLeft) {
  const auto plan = wide_plan(host(20), {.batch = 1, .state_bytes = 0});
  EXPECT_TRUE(plan.remedies.empty());
  EXPECT_THAT(unwrapped(plan),
              AllOf(HasSubstr(". Take a smaller model or a host with more memory."),
                    Not(HasSubstr("needed with"))));
}

// Qwen3's activations of 2048 tokens do not fit a T4 at batch 1: no batch is smaller.
TEST(Advice, ABatchOfOneIsNotMadeSmaller) {
  const auto sizes = model_named("qwen3-32b");
  const auto wide = transformer_profile(sizes, 2048, Precision::Float);
  const auto narrow = transformer_profile(sizes, 2048, Precision::Narrow);
  const Machine machine = {.device = device_named("t4"), .network = network_named("8x400g")};
  const auto plan = make_plan(wide, {}, machine, {.ranks = 8, .narrow = narrow});
  ASSERT_EQ(plan.remedies.size(), 3);
  EXPECT_THAT(plan.remedies[0].change, HasSubstr("activations computed twice"));
  EXPECT_EQ(plan.remedies[1].change, "sgd instead of Adam (optimizer: sgd)");
  EXPECT_EQ(plan.remedies[2].change, "16 bits (mixed_precision: fp16)") << "a T4 has no bfloat16";
  const Training all = {
      .precision = Precision::Narrow, .recomputed = Recomputed::Blocks, .state_bytes = 0};
  EXPECT_DOUBLE_EQ(plan.remedies[2].memory.total,
                   memory_of(narrow, all, Strategy::FsdpFull, machine, 8).total);
  EXPECT_THAT(unwrapped(plan), AllOf(HasSubstr("GiB, and also with sgd instead of Adam"),
                                     HasSubstr("a smaller model or a device with more memory"),
                                     Not(HasSubstr("batch_size")), Not(HasSubstr("accumulation"))));
  EXPECT_EQ(make_plan(wide, {}, machine, {.ranks = 8}).remedies.size(), 2) << "without 16 bits";
}

TEST(Advice, ALargeBatchIsHalvedUntilItFits) {
  const auto model = transformer_profile(model_named("qwen3-8b"), 2048, Precision::Float);
  const Machine machine = {.device = device_named("h200"), .network = network_named("8x400g")};
  const auto plan = make_plan(model, {.batch = 64}, machine, {.ranks = 8});
  ASSERT_FALSE(plan.remedies.empty());
  EXPECT_EQ(plan.remedies[0].change, "training.batch_size: 2 and gradient_accumulation_steps: 32");
  EXPECT_TRUE(plan.remedies[0].memory.fits());
}

// A step has as many samples as before, or fewer more than it has micro-batches, which are named.
TEST(Advice, AnOddBatchIsDividedIntoNearlyAsManySamples) {
  const auto model = profile_of({.model = {.kind = "resnet18"}}, {{3, 32, 32}, 10});
  const auto advised = [&](int64_t batch, int64_t accumulation) {
    const auto plan =
        make_plan(model, {.batch = batch, .accumulation = accumulation}, host(10, 1), {.ranks = 1});
    EXPECT_FALSE(plan.remedies.empty());
    return plan.remedies.empty() ? "" : plan.remedies[0].change;
  };
  EXPECT_EQ(advised(4096, 1), "training.batch_size: 2048 and gradient_accumulation_steps: 2");
  EXPECT_EQ(advised(4095, 1),
            "training.batch_size: 2048 and gradient_accumulation_steps: 2 (4096 samples a rank and "
            "step instead of 4095)");
  EXPECT_EQ(advised(4095, 3),
            "training.batch_size: 2048 and gradient_accumulation_steps: 6 (12288 samples a rank "
            "and step instead of 12285)");
  EXPECT_EQ(advised(6141, 1),
            "training.batch_size: 1536 and gradient_accumulation_steps: 4 (6144 "
            "samples a rank and step instead of 6141)");
}

TEST(Advice, LargeBatchesOfEvaluationsAreMadeSmaller) {
  const auto tiny = profile_of({.model = {.kind = "mlp", .mlp = {.hidden = {256}}}}, {{784}, 10});
  const auto plan =
      make_plan(tiny, {.batch = 64, .evaluation_batch = 10000000}, host(10), {.ranks = 1});
  ASSERT_FALSE(plan.remedies.empty());
  EXPECT_EQ(plan.remedies[0].change,
            "smaller batches in evaluations (training.eval_batch_size: 64)");
  EXPECT_THAT(unwrapped(plan), HasSubstr("batch 64 a rank (10000000 in evaluations), float32"));
}

TEST(Advice, OtherNumbersOfRanksThatFitAreNamedWithTheirHosts) {
  const auto model = transformer_profile(model_named("qwen3-8b"), 2048, Precision::Narrow);
  const Machine machine = {.device = device_named("a100-80gb"),
                           .network = network_named("8x200g"),
                           .devices_per_node = 2};
  const auto plan = make_plan(model, {.precision = Precision::Narrow}, machine, {.ranks = 1});
  ASSERT_FALSE(plan.best);
  const auto text = fmt::format("It would fit from {} ranks on ({}), by ", plan.least_ranks,
                                plan.least_ranks == 2 ? "one host" : "2 hosts");
  EXPECT_THAT(unwrapped(plan), HasSubstr(text));
}

// The ranks of this host, those of more hosts and their network, of which nothing is known.
TEST(Advice, NumbersOfRanksSayOnHowManyHostsTheyAre) {
  const auto tiny = profile_of({.model = {.kind = "mlp", .mlp = {.hidden = {256}}}}, {{784}, 10});
  Machine machine = host(20);
  const auto two = unwrapped(make_plan(tiny, {.batch = 64}, machine, {.ranks = 2}));
  EXPECT_THAT(two, AllOf(HasSubstr("ranks  hosts"), ContainsRegex(" 2 +1 +Ddp"),
                         ContainsRegex(" 8 +4 +Ddp"),
                         HasSubstr("More than 2 ranks are on several hosts of 2 x cpu. The network "
                                   "between them is taken to be ethernet-10g, 1.12 GB/s a host "
                                   "(--network).")));
  machine.devices_per_node = 1 << 17;
  EXPECT_THAT(unwrapped(make_plan(tiny, {.batch = 64}, machine, {.ranks = 2})),
              Not(HasSubstr("several hosts")));
}

// From batches with which Fsdp gains much to those with which it gains nothing.
TEST(Advice, NoStrategyThatFitsIsMoreThanFivePercentFaster) {
  const auto model =
      profile_of({.model = {.kind = "mlp", .mlp = {.hidden = {2048, 2048}}}}, {{784}, 10});
  Machine machine = host(20);
  machine.all_gather = {{1024, 2e-6}, {25e6, 5e-3}};
  std::set<Strategy> advised;
  for (int64_t batch = 8; batch < 4096; batch += 1 + batch / 4) {
    const auto plan = make_plan(model, {.batch = batch}, machine, {.ranks = 2});
    ASSERT_TRUE(plan.best) << batch;
    advised.insert(plan.best->strategy);
    for (const auto& row : plan.strategies) {
      EXPECT_LE(plan.best->time.total, 1.05 * row.time.total)
          << batch << ": " << name_of(row.strategy) << " in the place of "
          << name_of(plan.best->strategy);
    }
  }
  EXPECT_EQ(advised.size(), 2);  // Ddp and SHARD_GRAD_OP
}

TEST(Advice, ASpeedOfThousandsIsAWholeNumber) {
  const auto tiny = profile_of({.model = {.kind = "mlp", .mlp = {.hidden = {256}}}}, {{784}, 10});
  EXPECT_THAT(unwrapped(make_plan(tiny, {.batch = 65536}, host(20), {.ranks = 4096})),
              ContainsRegex("; 4096 ranks are [1-4][0-9][0-9][0-9] times as fast as one alone\\."));
}

TEST(Advice, RanksThatAreSlowerThanOneAreCalledSo) {
  const auto tiny =
      profile_of({.model = {.kind = "mlp", .mlp = {.hidden = {2048, 2048}}}}, {{784}, 10});
  Machine machine = host(20);
  EXPECT_THAT(unwrapped(make_plan(tiny, {.batch = 64}, machine, {.ranks = 2})),
              ContainsRegex("; 2 ranks are [0-9.]+ times as fast as one alone\\."));
  machine.network = network_named("ethernet-1g");
  EXPECT_THAT(unwrapped(make_plan(tiny, {.batch = 1}, machine, {.ranks = 4})),
              ContainsRegex("; 4 ranks are only [0-9]+ % as fast as one alone: what they send"));
}

TEST(Advice, TheCommandAsksWhatSixteenBitsNeed) {
  const auto out = test::lockstep_tool("plan --model qwen3-32b --device t4 --json");
  EXPECT_EQ(out.status, 3);
  const auto remedies = nlohmann::json::parse(out.said).at("remedies");
  ASSERT_EQ(remedies.size(), 3);
  EXPECT_THAT(remedies.at(2).at("change").get<std::string>(), HasSubstr("mixed_precision: fp16"));
  EXPECT_FALSE(remedies.at(2).at("memory_bytes").at("fits"));
}

// Every change that is advised, written into the file, is taken by `lockstep config check`.
TEST(Advice, AFileTakesWhatIsAdvised) {
  const test::Folder folder;
  const std::string file = folder / "run.yaml", bench = folder / "machine.json";
  Machine machine = host(2);
  machine.device.reserved_bytes = 1;
  const auto advised = [&](const std::string& text, const std::string& flags) {
    std::ofstream(file) << text;
    machine.devices_per_node = flags == "--ranks 1" ? 1 : 2;  // as they were measured
    std::ofstream(bench) << machine_json(machine);
    const auto out =
        test::lockstep_tool(fmt::format("plan {} --machine {} --json {}", file, bench, flags));
    EXPECT_EQ(out.status, 3) << out.said;
    std::vector<std::string> changes;
    const auto plan = nlohmann::json::parse(out.said);
    for (const auto& remedy : plan.at("remedies")) {
      changes.push_back(remedy.at("change"));
      std::string sets;
      const std::regex key("([a-z_.]+): ([a-z0-9]+)");
      for (std::sregex_iterator at(changes.back().begin(), changes.back().end(), key), end;
           at != end; ++at) {
        sets += fmt::format(" --set {}={}", at->str(1), at->str(2));
      }
      EXPECT_NE(sets, "") << changes.back();
      const auto checked = test::lockstep_tool("config check " + file + sets);
      EXPECT_EQ(checked.status, 0) << changes.back() << ": " << checked.said;
    }
    return changes;
  };
  const std::string resnet = "model: {kind: resnet18}\ndata: {kind: fashion-mnist}\n";
  EXPECT_THAT(
      advised(resnet + "training: {batch_size: 300}\n", "--ranks 2"),
      AllOf(Contains(HasSubstr("parallel.fsdp.activation_checkpointing: true")),
            Contains(HasSubstr("training.batch_size: 150 and gradient_accumulation_steps: 2"))));
  EXPECT_THAT(advised(resnet + "training: {batch_size: 600}\n", "--ranks 1"),
              Not(Contains(HasSubstr("computed twice"))));
  EXPECT_THAT(
      advised(resnet + "training: {batch_size: 300, eval_batch_size: 65536}\n", "--ranks 2"),
      Contains(HasSubstr("training.eval_batch_size: 0, training.batch_size: 150")));
  EXPECT_THAT(advised("model: {kind: mlp, hidden: [9000, 9000]}\ndata: {kind: fashion-mnist}\n"
                      "training: {batch_size: 30000}\n",
                      "--ranks 2"),
              Not(Contains(HasSubstr("computed twice"))));
  EXPECT_THAT(advised("model: {kind: transformer, vocabulary: 1000, layers: 12, hidden: 512, "
                      "heads: 8}\ndata: {kind: tokens, path: nowhere, sequence_length: 256}\n"
                      "training: {batch_size: 8, eval_strategy: \"no\"}\n",
                      "--ranks 2"),
              Contains(HasSubstr("training.activation_checkpointing: full")));
}

// What only Fsdp recomputes is kept under Ddp.
TEST(Advice, FsdpAloneRecomputesBlocksOfAResNet) {
  train::RunConfig config;
  config.model.kind = "resnet18";
  config.parallel.strategy = "fsdp";
  config.parallel.fsdp.activation_checkpointing = true;
  const auto model = profile_of(config, {{3, 32, 32}, 10});
  const auto on = [&](Strategy strategy) {
    return memory_of(model, training_of(config), strategy, host(20), 2).activations;
  };
  const auto computation = [&](Strategy strategy) {
    return work_of(model, training_of(config), strategy, host(20), 2).computation;
  };
  EXPECT_LT(on(Strategy::FsdpFull), 0.5 * on(Strategy::Ddp));
  EXPECT_GT(computation(Strategy::FsdpFull), 1.2 * computation(Strategy::Ddp));
  const auto full = on(Strategy::Ddp);
  config.parallel.fsdp.activation_checkpointing = false;
  EXPECT_DOUBLE_EQ(on(Strategy::Ddp), full);
}

TEST(Advice, UnknownDevicesHaveANeighbourOnlyIfThereIsOne) {
  const auto said = [](const std::string& name) {
    return test::lockstep_tool("plan --model qwen3-4b --device " + name).said;
  };
  EXPECT_THAT(said("a100"), HasSubstr("unknown device 'a100'; the nearest is a100-40gb; known"));
  EXPECT_THAT(said("foo"), HasSubstr("unknown device 'foo'; known are t4, "));
}

TEST(Plan, SaysWhatEncryptingCosts) {
  auto config = wide_perceptron();
  const auto text = [&](int64_t ranks) {
    return plan_text(plan_of(config, config, host(4096), training_of(config), ranks), 0);
  };
  const auto said = HasSubstr("without encryption (parallel.tls)");
  EXPECT_THAT(text(4), Not(said));
  config.parallel.tls = true;
  EXPECT_THAT(text(4), said);
  EXPECT_THAT(text(2), Not(said));  // on one host nothing is encrypted
}

}  // namespace
}  // namespace lockstep::plan
