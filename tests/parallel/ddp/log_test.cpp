// What Ddp writes down about its passes, and options about which tensors take part.
#include <nlohmann/json.hpp>

#include "lockstep/parallel/ddp_log.h"
#include "lockstep/parallel/hooks.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

TEST(DdpLog, B60_SaysWhatWasDone) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group(), {.bucket_bytes = {200}});
    EXPECT_EQ(ddp.log().pass_count, 0);
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      torch::tanh(net.second(torch::tanh(net.first(input(world.rank(), step)))))
          .square()
          .mean()
          .backward();
    }
    const DdpLog log = ddp.log();
    EXPECT_EQ(log.backend, "shm");
    EXPECT_EQ(log.rank, world.rank());
    EXPECT_EQ(log.world_size, 2);
    EXPECT_EQ(log.hook, "all_reduce");
    EXPECT_EQ(log.parameters, 6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3);
    EXPECT_EQ(log.parameter_bytes, 4 * log.parameters);
    EXPECT_EQ(log.bucket_bytes.size(), ddp.buckets().size());
    EXPECT_TRUE(log.rebuilt);
    EXPECT_EQ(log.order.size(), 4U);
    EXPECT_THAT(log.unused, ::testing::ElementsAre("third.weight", "third.bias"));
    EXPECT_EQ(log.pass_count, 3);
    ASSERT_EQ(log.passes.size(), 3U);
    EXPECT_EQ(log.passes.back().buckets.size(), log.bucket_bytes.size());
    for (const PassTimes& pass : log.passes) {
      EXPECT_LE(pass.since, pass.first_gradient);
      EXPECT_LE(pass.first_gradient, pass.last_gradient);
      EXPECT_LE(pass.last_gradient, pass.over);
      for (const auto& bucket : pass.buckets) {
        EXPECT_GE(bucket.started, pass.first_gradient);
        EXPECT_LE(bucket.started, bucket.over);
        EXPECT_LE(bucket.over, pass.over);
        EXPECT_GT(bucket.bytes, 0);
      }
      EXPECT_LE(pass.overlap(), pass.communication());
      EXPECT_LE(pass.communication().count(), (pass.backward() + pass.exposed()).count() + 1e-3);
    }
    EXPECT_THAT(log.summary(), ::testing::HasSubstr("mean of 3 passes"));
  });
}

TEST(DdpLog, B60_TheTraceIsChromes) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group(), {.bucket_bytes = {200}});
    square_loss(net, world.rank()).backward();
    const auto trace = nlohmann::json::parse(ddp.log().chrome_trace());
    std::map<std::string, int> spans;
    for (const auto& event : trace.at("traceEvents")) {
      EXPECT_EQ(event.at("pid"), world.rank());
      if (event.at("ph") != "X") continue;
      EXPECT_GE(event.at("dur").get<double>(), 0);
      ++spans[event.at("name")];
    }
    EXPECT_EQ(spans["forward"], 1);
    EXPECT_EQ(spans["backward"], 1);
    EXPECT_EQ(spans["wait"], 1);
    // In the buckets it ran in, which were rebuilt after it.
    EXPECT_GT(spans["all_reduce"], 1);
  });
}

TEST(DdpLog, B60_KeepsTheLastPassesOnly) {
  spawn(2, [](World& world) {
    torch::nn::Linear net(1, 1);
    Ddp ddp(*net, world.group());
    for (size_t pass = 0; pass < DdpLog::kPasses + 10; ++pass)
      net->forward(at::ones({1, 1})).sum().backward();
    EXPECT_EQ(ddp.log().passes.size(), DdpLog::kPasses);
    EXPECT_EQ(ddp.log().pass_count, static_cast<int64_t>(DdpLog::kPasses) + 10);
  });
}

TEST(DdpLog, B60_NamesTheHook) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group(), {.hook = std::make_shared<CastHook>(at::kBFloat16)});
    EXPECT_EQ(ddp.log().hook, "cast to bfloat16");
    EXPECT_THAT(ddp.log().summary(), ::testing::HasSubstr("cast to bfloat16"));
  });
}

TEST(DdpLog, AGroupOfOneHasNothingToTell) {
  isolated([] {
    Mlp net;
    Ddp ddp(net, Group());
    square_loss(net, 0).backward();
    EXPECT_EQ(ddp.log().pass_count, 0);
    EXPECT_THAT(ddp.log().summary(), ::testing::HasSubstr("rank 0 of 1"));
  });
}

struct WithBuffers : torch::nn::Module {
  explicit WithBuffers(int rank) {
    torch::manual_seed(rank);
    linear = register_module("linear", torch::nn::Linear(2, 1));
    extra = register_module("extra", torch::nn::Linear(2, 1));
    mean = register_buffer("mean", at::full({3}, static_cast<double>(rank)));
    count = register_buffer("count", torch::tensor({int64_t{rank}}));
  }
  torch::nn::Linear linear{nullptr}, extra{nullptr};
  at::Tensor mean, count;
};

TEST(Buffers, B39_AverageOfFloatsAndRankZerosIntegers) {
  spawn(3, [](World& world) {
    WithBuffers net(world.rank());
    Ddp ddp(net, world.group(), {.buffers = Buffers::Average});
    EXPECT_TRUE(at::equal(net.mean, at::zeros({3})));  // at the start rank 0's in any case
    net.mean.fill_(world.rank());
    net.count.fill_(world.rank() + 7);
    net.linear(at::ones({1, 2})).sum().backward();
    EXPECT_TRUE(at::equal(net.mean, at::ones({3})));
    EXPECT_EQ(net.count.item<int64_t>(), 7);
  });
}

TEST(Ignore, B59_TakesNoPart) {
  spawn(2, [](World& world) {
    WithBuffers net(world.rank());
    const at::Tensor before = net.extra->weight.detach().clone();
    Ddp ddp(net, world.group(), {.ignore = {"extra.weight", "mean"}});
    EXPECT_TRUE(at::equal(net.extra->weight, before));
    EXPECT_EQ(net.mean[0].item<float>(), static_cast<float>(world.rank()));
    (net.extra(at::ones({1, 2}) * world.rank()).sum() + net.linear(at::ones({1, 2})).sum())
        .backward();
    EXPECT_TRUE(
        at::equal(net.extra->weight.grad(), at::full({1, 2}, static_cast<float>(world.rank()))));
    EXPECT_THROW(Ddp(net, world.group(), {.ignore = {"extra.wieght"}}), ConfigError);
  });
}

}  // namespace
}  // namespace lockstep::test
