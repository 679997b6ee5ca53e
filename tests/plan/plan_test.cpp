// What plan says of memory and time.
#include "lockstep/plan/plan.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "lockstep/core/error.h"
#include "lockstep/plan/grpo_memory.h"

namespace lockstep::plan {
namespace {

using testing::HasSubstr;

constexpr double kGiB = 1 << 30;

Machine cluster(const char* device) {
  return {.device = device_named(device), .network = network_named("8x400g")};
}

ModelProfile qwen(const char* name, Precision precision = Precision::Narrow) {
  return transformer_profile(model_named(name), 2048, precision);
}

TEST(Plan, ParametersArePublishedCounts) {
  EXPECT_EQ(qwen("qwen3-0.6b").elements(), 596049920);
  EXPECT_EQ(qwen("Qwen/Qwen3-4B").elements(), 4022468096);
  EXPECT_EQ(qwen("qwen3-8b").elements(), 8190735360);
}

TEST(Plan, EachStrategyDividesWhatItSays) {
  const auto model = qwen("qwen3-4b");
  const Training training = {.precision = Precision::Narrow};
  const auto all = static_cast<double>(model.elements());
  const auto machine = cluster("h100-sxm");
  const auto ddp = memory_of(model, training, Strategy::Ddp, machine, 16);
  EXPECT_DOUBLE_EQ(ddp.gradients, 4 * all);
  EXPECT_DOUBLE_EQ(ddp.optimizer, 8 * all);
  const auto zero = memory_of(model, training, Strategy::Zero, machine, 16);
  EXPECT_DOUBLE_EQ(zero.gradients, 4 * all);
  EXPECT_DOUBLE_EQ(zero.optimizer, 8 * all / 16);
  const auto gradients = memory_of(model, training, Strategy::FsdpGradients, machine, 16);
  EXPECT_DOUBLE_EQ(gradients.gradients, 4 * all / 16);
  EXPECT_DOUBLE_EQ(gradients.gathered, 2 * all);
  const auto full = memory_of(model, training, Strategy::FsdpFull, machine, 16);
  EXPECT_LT(full.gathered, 0.4 * gradients.gathered);
  const auto hybrid = memory_of(model, training, Strategy::FsdpHybrid, machine, 16);
  EXPECT_DOUBLE_EQ(hybrid.optimizer, 8 * all / 8);
  EXPECT_GT(ddp.total, zero.total);
  EXPECT_GT(zero.total, gradients.total);
  EXPECT_GT(hybrid.total, full.total);
}

TEST(Plan, OffloadedShardsNeedNoMemoryOfTheDevice) {
  train::RunConfig config;
  config.parallel.strategy = "fsdp";
  config.parallel.fsdp.cpu_offload = true;
  const auto model = qwen("qwen3-4b");
  const auto of = [&](const Machine& machine, Strategy strategy) {
    return memory_of(model, training_of(config), strategy, machine, 2);
  };
  const auto gpus = cluster("h100-sxm");
  const auto offloaded = of(gpus, Strategy::FsdpFull);
  EXPECT_EQ(offloaded.parameters + offloaded.gradients + offloaded.optimizer, 0);
  EXPECT_GT(offloaded.gathered, 0);
  EXPECT_GT(of(gpus, Strategy::Ddp).optimizer, 0);
  Machine cpus = this_host();
  cpus.devices_per_node = 2;
  EXPECT_GT(of(cpus, Strategy::FsdpFull).optimizer, 0);  // there it is the same memory
  config.parallel.fsdp.offload_folder = "/tmp";
  const auto in_files = of(cpus, Strategy::FsdpFull);
  EXPECT_EQ(in_files.parameters + in_files.gradients + in_files.optimizer, 0);
  EXPECT_GT(in_files.gathered, 0);
  EXPECT_THAT(plan_text(make_plan(model, training_of(config), cpus, {.ranks = 2})),
              HasSubstr("optimizer's state are in files"));
}

ModelProfile perceptron() {
  return profile_of({.model = {.kind = "mlp", .mlp = {.hidden = {2048, 2048}}}}, {{784}, 10});
}

// Ranks of one host exchange gradients in memory that they share, which comes in pages of 2 MiB:
// of buckets of 16.1 and 6.1 MiB 18 and 8.
TEST(Plan, SharedMemoryComesInWholePages) {
  constexpr double kMiB = 1 << 20;
  const auto model = perceptron();
  const auto whole = 4 * static_cast<double>(model.elements());
  Machine machine = this_host();
  machine.devices_per_node = 2;
  const auto on = [&](Strategy strategy) { return memory_of(model, {}, strategy, machine, 2); };
  EXPECT_DOUBLE_EQ(on(Strategy::Ddp).gradients, 26 * kMiB);
  EXPECT_DOUBLE_EQ(on(Strategy::Ddp).parameters, whole);
  EXPECT_DOUBLE_EQ(on(Strategy::Zero).parameters, 24 * kMiB);
  EXPECT_DOUBLE_EQ(on(Strategy::FsdpFull).parameters, 12 * kMiB);
  EXPECT_DOUBLE_EQ(on(Strategy::FsdpFull).communication, 24 * kMiB);
  EXPECT_DOUBLE_EQ(on(Strategy::FsdpFull).gradients, whole / 2);
  machine.device.shares_memory = false;
  EXPECT_DOUBLE_EQ(on(Strategy::Ddp).gradients, whole);
}

// One rank has no buckets: while the first gradients are computed the others have no memory.
TEST(Plan, OneRanksGradientsGrowWhileActivationsGo) {
  const auto sizes = train::TransformerConfig{
      .vocabulary = 4096, .layers = 6, .hidden = 512, .heads = 8, .tied = true};
  const auto model = transformer_profile(sizes, 128, Precision::Float);
  const auto whole = 4 * static_cast<double>(model.elements());
  const auto on = [&](int64_t batch, int64_t accumulation) {
    const Training training = {.batch = batch, .accumulation = accumulation};
    return memory_of(model, training, Strategy::Ddp, this_host(), 1);
  };
  EXPECT_LT(on(8, 1).gradients, 0.2 * whole);
  EXPECT_GT(on(1, 1).gradients, 0.3 * whole);  // fewer activations, so the end counts
  EXPECT_GE(on(1, 1).gradients + on(1, 1).activations + on(1, 1).working, whole);
  EXPECT_DOUBLE_EQ(on(8, 2).gradients, whole);
}

// 2048 images of 32 channels of 28 x 28 before and after an operator, and two batches. A run of
// this file had a peak of 225.5 MB without evaluations and of 639.1 MB with them.
TEST(Plan, LargeBatchesOfEvaluationsAreCounted) {
  train::RunConfig config;
  config.model.kind = "convnet";
  config.training.batch_size = 8;
  config.data = {.kind = "fashion-mnist", .prefetch = 1};
  const auto model = profile_of(config, {{1, 28, 28}, 10});
  const auto memory = [&](int64_t samples, const char* strategy = "epoch") {
    config.training.eval_strategy = strategy;
    config.training.eval_batch_size = samples;
    return memory_of(model, training_of(config), Strategy::Ddp, this_host(), 1);
  };
  const double channels = static_cast<double>(config.model.convnet.channels.front());
  const double forward = 2048.0 * (2 * 4 * channels * 28 * 28 + 2 * (4 * 28 * 28 + 8));
  const auto large = memory(2048);
  EXPECT_NEAR(large.activations + large.working, forward, 0.01 * forward);
  EXPECT_DOUBLE_EQ(memory(0).total, memory(2048, "no").total);
  EXPECT_DOUBLE_EQ(memory(0).total, memory(8).total);
  EXPECT_THROW(make_plan(model, {.evaluation_batch = -1}, this_host()), ConfigError);
}

TEST(Plan, AFilesShardingIsPlanned) {
  train::RunConfig config;
  config.parallel.strategy = "fsdp";
  const auto planned = [&](const char* sharding, bool reshards) {
    config.parallel.fsdp.sharding_strategy = sharding;
    config.parallel.fsdp.reshard_after_forward = reshards;
    return strategy_of(config);
  };
  EXPECT_EQ(planned("NO_SHARD", true), Strategy::Ddp);
  EXPECT_EQ(planned("FULL_SHARD", true), Strategy::FsdpFull);
  EXPECT_EQ(planned("FULL_SHARD", false), Strategy::FsdpGradients);
  EXPECT_EQ(planned("SHARD_GRAD_OP", true), Strategy::FsdpGradients);
  EXPECT_EQ(planned("HYBRID_SHARD", true), Strategy::FsdpHybrid);
  EXPECT_EQ(planned("HYBRID_SHARD_ZERO2", true), Strategy::FsdpHybridGradients);
  const auto model = qwen("qwen3-4b");
  const Training training = {.precision = Precision::Narrow};
  const auto machine = cluster("h100-sxm");
  const auto on = [&](Strategy s) { return memory_of(model, training, s, machine, 16); };
  EXPECT_DOUBLE_EQ(on(Strategy::FsdpHybridGradients).gathered,
                   2 * static_cast<double>(model.elements()));
  EXPECT_DOUBLE_EQ(on(Strategy::FsdpHybridGradients).optimizer, on(Strategy::FsdpHybrid).optimizer);
  const auto collectives = [&](Strategy s) {
    return work_of(model, training, s, machine, 16).collectives;
  };
  EXPECT_LT(collectives(Strategy::FsdpHybridGradients), collectives(Strategy::FsdpHybrid));
}

// 8 lanes on 2 ranks: each computes four one after the other, and holds two sums.
TEST(Plan, LanesAreComputedOneAfterTheOther) {
  train::RunConfig config;
  config.parallel.lanes = 8;
  EXPECT_EQ(training_of(config).lanes, 8);
  const auto model = qwen("qwen3-0.6b");
  const auto machine = cluster("h100-sxm");
  const auto whole = 4 * static_cast<double>(model.elements());
  const Training without = {}, lanes = {.lanes = 8};
  const auto work = [&](const Training& training, int64_t ranks) {
    return work_of(model, training, Strategy::Ddp, machine, ranks).computation;
  };
  EXPECT_DOUBLE_EQ(work(lanes, 8), work(without, 8));
  EXPECT_NEAR(work(lanes, 2) / work(without, 2), 4, 0.04);
  const auto memory = [&](const Training& training, Strategy strategy, int64_t ranks) {
    return memory_of(model, training, strategy, machine, ranks);
  };
  EXPECT_DOUBLE_EQ(memory(lanes, Strategy::Ddp, 8).communication, 0);
  EXPECT_DOUBLE_EQ(memory(lanes, Strategy::Ddp, 2).communication, whole);
  EXPECT_DOUBLE_EQ(memory(lanes, Strategy::Ddp, 1).communication, 2 * whole);
  EXPECT_DOUBLE_EQ(memory(lanes, Strategy::FsdpFull, 2).communication -
                       memory(without, Strategy::FsdpFull, 2).communication,
                   2 * whole);
  const auto plan = make_plan(model, lanes, machine, {.ranks = 2});
  EXPECT_DOUBLE_EQ(plan.strategies[0].samples_per_second * plan.strategies[0].time.total, 8);
  EXPECT_THAT(plan_text(plan, 100), HasSubstr("a lane of 8"));
}

// Measured of resnet18 with 64 images under Autocast: 172.8 MB, of which 22.3 are weights' copies.
TEST(Plan, ActivationsAreCountedInTheRunsPrecision) {
  train::RunConfig config = {.model = {.kind = "resnet18"}};
  const auto kept = [&](const char* dtype) {
    config.mixed_precision.dtype = dtype;
    Training training = training_of(config);
    training.batch = 64;
    return memory_of(profile_of(config, {{3, 32, 32}, 10}), training, Strategy::Ddp, this_host(), 1)
        .activations;
  };
  EXPECT_NEAR(kept("bf16") / 150.4e6, 1, 0.01);
  EXPECT_NEAR(kept("no") / 300e6, 1, 0.01);
}

// A run refuses more ranks than lanes.
TEST(Plan, NoMoreRanksThanLanesArePlanned) {
  const auto model = qwen("qwen3-0.6b");
  const auto machine = cluster("h100-sxm");
  const Training lanes = {.lanes = 8};
  const auto plan = make_plan(model, lanes, machine, {.ranks = 8});
  EXPECT_EQ(plan.sizes.back().ranks, 8);
  EXPECT_EQ(make_plan(model, {}, machine).sizes.back().ranks, 131072);
  EXPECT_EQ(make_plan(model, {.lanes = 4}, machine).ranks, 4) << "of 8 devices";
  EXPECT_THAT([&] { make_plan(model, lanes, machine, {.ranks = 16}); },
              testing::ThrowsMessage<ConfigError>(HasSubstr("--ranks of at most 8")));
}

TEST(Plan, LibrariesOfTheKernelsInUseAreReserved) {
  Machine machine = this_host();
  machine.device.reserved_bytes = 100e6;
  machine.device.convolution_bytes = 15e6;
  machine.device.attention_bytes = 7e6;
  const auto reserved = [&](const ModelProfile& model) {
    return memory_of(model, {}, Strategy::Ddp, machine, 1).reserved;
  };
  EXPECT_DOUBLE_EQ(reserved(perceptron()), 100e6);
  EXPECT_DOUBLE_EQ(reserved(profile_of({.model = {.kind = "convnet"}}, {{3, 32, 32}, 10})), 115e6);
  EXPECT_DOUBLE_EQ(reserved(qwen("qwen3-0.6b")), 107e6);
}

TEST(Plan, AccumulationHoldsWholeGradientsAndSendsOnce) {
  const auto model = qwen("qwen3-4b");
  const auto machine = cluster("h100-sxm");
  const Training once = {.precision = Precision::Narrow};
  const Training four = {.accumulation = 4, .precision = Precision::Narrow};
  EXPECT_GT(memory_of(model, four, Strategy::FsdpFull, machine, 8).communication,
            memory_of(model, once, Strategy::FsdpFull, machine, 8).communication);
  const auto work_once = work_of(model, once, Strategy::Ddp, machine, 8);
  const auto work_four = work_of(model, four, Strategy::Ddp, machine, 8);
  EXPECT_NEAR(work_four.computation, 4 * work_once.computation,
              1e-9 + 0.01 * work_four.computation);
  EXPECT_DOUBLE_EQ(work_four.collectives, work_once.collectives);
}

// Which one_cycle moves, also where the file has none.
TEST(Plan, CountsMomentumThatTheScheduleMoves) {
  train::RunConfig config{.optimizer = {.kind = "sgd"}, .schedule = {.kind = "one_cycle"}};
  EXPECT_EQ(training_of(config).state_bytes, 4);
  config.schedule.cycle_momentum = false;
  EXPECT_EQ(training_of(config).state_bytes, 0);
}

TEST(Plan, AveragedWeightsAreDividedAsShardsAre) {
  const auto model = qwen("qwen3-4b");
  const auto all = static_cast<double>(model.elements());
  const auto machine = cluster("h100-sxm");
  const auto training = training_of({.weight_average = {.kind = "ema"}});
  const auto of = [&](Strategy strategy) {
    return memory_of(model, training, strategy, machine, 16).optimizer -
           memory_of(model, training_of({}), strategy, machine, 16).optimizer;
  };
  EXPECT_DOUBLE_EQ(of(Strategy::Ddp), 4 * all);
  EXPECT_DOUBLE_EQ(of(Strategy::Zero), 4 * all);
  EXPECT_DOUBLE_EQ(of(Strategy::FsdpFull), 4 * all / 16);
}

TEST(Plan, ComputingTwiceTradesTimeForMemory) {
  const auto model = qwen("qwen3-8b");
  const auto machine = cluster("h100-sxm");
  const Training kept = {.batch = 8, .precision = Precision::Narrow};
  const Training again = {
      .batch = 8, .precision = Precision::Narrow, .recomputed = Recomputed::Blocks};
  EXPECT_LT(memory_of(model, again, Strategy::FsdpFull, machine, 8).activations,
            0.1 * memory_of(model, kept, Strategy::FsdpFull, machine, 8).activations);
  const double ratio = work_of(model, again, Strategy::FsdpFull, machine, 8).computation /
                       work_of(model, kept, Strategy::FsdpFull, machine, 8).computation;
  EXPECT_GT(ratio, 1.2);
  EXPECT_LT(ratio, 1.34);
}

TEST(Plan, ASmallModelIsForDdpAndALargeOneForFsdp) {
  const auto machine = cluster("a100-80gb");
  const Training training = {.precision = Precision::Narrow, .recomputed = Recomputed::Blocks};
  Training larger = training;
  larger.batch = 16;  // so that computation outweighs what is sent
  const auto small = make_plan(qwen("qwen3-0.6b"), larger, machine, {.ranks = 8});
  ASSERT_TRUE(small.best);
  EXPECT_TRUE(small.best->strategy == Strategy::Ddp || small.best->strategy == Strategy::Zero);
  const auto large = make_plan(qwen("qwen3-14b"), training, machine, {.ranks = 8});
  ASSERT_TRUE(large.best);
  EXPECT_TRUE(large.best->strategy == Strategy::FsdpFull ||
              large.best->strategy == Strategy::FsdpGradients);
  EXPECT_THAT(plan_text(large, 80), HasSubstr("Under Ddp each rank has the whole model"));
  const auto none = make_plan(qwen("qwen3-32b"), training, machine, {.ranks = 2});
  EXPECT_FALSE(none.best);
  EXPECT_GT(none.least_ranks, 2);
  EXPECT_THAT(plan_text(none, 80), HasSubstr("Nothing fits on 2 ranks"));
}

// An estimated gain of some percent is no reason to divide a model that fits many times.
TEST(Plan, ATinyModelIsForDdpOnAnyNumberOfRanks) {
  Machine machine = this_host();
  machine.devices_per_node = 4;
  const auto tiny = profile_of({.model = {.kind = "mlp", .mlp = {.hidden = {256}}}}, {{784}, 10});
  const auto plan = make_plan(tiny, {.batch = 64}, machine, {.ranks = 4});
  ASSERT_TRUE(plan.best);
  EXPECT_EQ(plan.best->strategy, Strategy::Ddp);
  EXPECT_THAT(plan_text(plan, 100), HasSubstr("less than such an estimate is good to"));
  for (const auto& row : plan.sizes) {
    if (row.ranks > 4) break;  // on several nodes the network decides
    EXPECT_EQ(row.strategy, Strategy::Ddp) << row.ranks;
  }
}

TEST(Plan, WhatAFileComputesTwiceIsPlanned) {
  train::RunConfig config;
  EXPECT_EQ(training_of(config).recomputed, Recomputed::Nothing);
  config.training.activation_checkpointing = "full";
  EXPECT_EQ(training_of(config).recomputed, Recomputed::Blocks);
  config.training.activation_checkpointing = "selective";
  EXPECT_EQ(training_of(config).recomputed, Recomputed::Cheap);
  EXPECT_EQ(training_of(config).sent_bytes, 4);
  config.parallel.hook = "bf16";
  EXPECT_EQ(training_of(config).sent_bytes, 2);
  const auto model = qwen("qwen3-4b");
  const auto kept = [&](Recomputed recomputed) {
    const Training training = {.precision = Precision::Narrow, .recomputed = recomputed};
    return memory_of(model, training, Strategy::Ddp, cluster("h100-sxm"), 1).activations;
  };
  EXPECT_LT(kept(Recomputed::Cheap), 0.8 * kept(Recomputed::Nothing));
  EXPECT_LT(kept(Recomputed::Blocks), 0.5 * kept(Recomputed::Cheap));
}

// Layers of 784 x 3072, 3072 x 3072 and 3072 x 10, the last two in one bucket. Trainings on 2 ranks
// had peaks 97 MB (power_sgd) and 178 MB (top_k) above that of plain averages.
TEST(Plan, WhatHooksKeepAndWorkWithIsCounted) {
  train::RunConfig config;
  config.model = {.kind = "mlp", .mlp = {.hidden = {3072, 3072}}};
  config.training.batch_size = 32;
  config.training.eval_strategy = "no";
  const auto model = profile_of(config, {{784}, 10});
  Machine machine = this_host();
  machine.devices_per_node = 2;
  const auto memory = [&](const char* hook, Strategy strategy = Strategy::Ddp) {
    config.parallel.hook = hook;
    return memory_of(model, training_of(config), strategy, machine, 2);
  };
  const auto whole = 4 * static_cast<double>(model.elements());
  const double square = 4.0 * 3072 * 3072;
  const auto none = memory("none"), low_rank = memory("power_sgd"), largest = memory("top_k");
  EXPECT_DOUBLE_EQ(low_rank.communication, whole);
  EXPECT_DOUBLE_EQ(largest.communication, whole);
  EXPECT_DOUBLE_EQ(low_rank.activations + low_rank.working, whole + square);
  EXPECT_DOUBLE_EQ(largest.working, 5 * square);
  EXPECT_NEAR(low_rank.total - none.total, 97e6, 7e6);
  EXPECT_NEAR(largest.total - none.total, 178e6, 25e6);
  EXPECT_DOUBLE_EQ(memory("top_k", Strategy::Zero).working, largest.working);
  EXPECT_DOUBLE_EQ(memory("top_k", Strategy::FsdpFull).total,
                   memory("none", Strategy::FsdpFull).total);
  machine.device.shares_memory = false;
  EXPECT_DOUBLE_EQ(memory("top_k").working, 2 * (square + 4 * (3072 + 10 * 3073)));
  config.parallel.hook = "top_k";
  EXPECT_THAT(plan_text(make_plan(model, training_of(config), machine, {.ranks = 2}), 0),
              HasSubstr("Memory has what the hook top_k keeps"));
}

TEST(Plan, ASlowNetworkMovesTheKnee) {
  const Training training = {.precision = Precision::Narrow, .recomputed = Recomputed::Blocks};
  Machine machine = cluster("h100-sxm");
  const auto fast = make_plan(qwen("qwen3-4b"), training, machine, {.ranks = 8});
  machine.network = network_named("ethernet-10g");
  const auto slow = make_plan(qwen("qwen3-4b"), training, machine, {.ranks = 8});
  EXPECT_EQ(slow.knee, 16);
  EXPECT_TRUE(fast.knee == 0 || fast.knee > 16) << fast.knee;
}

TEST(Plan, AMeasuredStepIsOneRanks) {
  Training training = {.precision = Precision::Narrow};
  training.measured_step = 0.5;
  const auto time = time_of(qwen("qwen3-0.6b"), training, Strategy::Ddp, cluster("h100-sxm"), 1);
  EXPECT_DOUBLE_EQ(time.total, 0.5);
  // One rank computes all lanes, each of eight ranks one of them.
  training.lanes = 8;
  const auto on = [&](int64_t ranks) {
    return time_of(qwen("qwen3-0.6b"), training, Strategy::Ddp, cluster("h100-sxm"), ranks);
  };
  EXPECT_DOUBLE_EQ(on(1).total, 0.5);
  EXPECT_DOUBLE_EQ(on(8).computation, on(1).computation / 8);
  EXPECT_DOUBLE_EQ(on(8).update, on(1).update);
}

// What the specification of the three domains counts by hand: 67.4 GiB a device under Ddp, 33.7,
// 16.9 and 8.4 divided by 2, 4 and 8; without the reference 59.9, 30.0, 15.0 and 7.5.
TEST(Plan, GrpoOnQwenFourBillion) {
  const auto sizes = model_named("qwen3-4b");
  const auto machine = cluster("h100-sxm");
  EXPECT_EQ(cache_bytes_per_token(sizes), 147456);
  const auto states = [&](Reference reference) {
    std::vector<double> out;
    for (const auto& m : grpo_memory(sizes, machine, {.reference = reference})) {
      if (m.devices == 1 || m.devices == 2 || m.devices == 4 || m.devices == 8) {
        out.push_back(std::round(10 * m.states / kGiB) / 10);
      }
    }
    return out;
  };
  EXPECT_THAT(states(Reference::Resident), testing::ElementsAre(67.4, 33.7, 16.9, 8.4));
  EXPECT_THAT(states(Reference::Offloaded), testing::ElementsAre(59.9, 30.0, 15.0, 7.5));
  // 20 bytes a parameter instead of 18, and keys and values of twice the size.
  const auto narrow = grpo_memory(sizes, machine).front();
  const auto wide = grpo_memory(sizes, machine, {.precision = Precision::Float}).front();
  EXPECT_EQ(wide.master, 0);
  EXPECT_EQ(wide.states * 18, narrow.states * 20);
  EXPECT_EQ(wide.cache, 2 * narrow.cache);
  EXPECT_THAT(grpo_text(sizes, machine, {}, 100), HasSubstr("use Ddp on any number"));
  EXPECT_THAT(grpo_text(sizes, cluster("a100-40gb"), {}, 100), HasSubstr("Use Fsdp on 3 devices"));
  EXPECT_THROW(grpo_memory(sizes, machine, {.new_tokens = 100000}), ConfigError);
}

// Ranks on the cores of one host have its memory together.
TEST(Plan, GrpoOnAHostSaysHowManyRanksItHolds) {
  const auto sizes = model_named("qwen3-0.6b");
  Machine host = this_host();
  host.devices_per_node = 8;
  host.device.shares_memory = true;
  const double one = grpo_memory(sizes, host).front().total;
  for (const int ranks : {1, 3}) {
    host.device.memory_bytes = (ranks + 0.5) * one;
    EXPECT_THAT(grpo_text(sizes, host, {}, 200),
                HasSubstr(fmt::format("Use Ddp on up to {} of them a host", ranks)));
  }
}

}  // namespace
}  // namespace lockstep::plan
