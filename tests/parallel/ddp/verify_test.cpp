// Ranks with different models, and modules that cannot be trained: one error, on every rank.
#include <unistd.h>

#include "lockstep/parallel/fsdp.h"
#include "parallel/ddp/model.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Rank 1 of 3 changes its module; all ranks throw, and the group lives on.
template <typename Change, typename Matcher>
void expect_refusal(Change change, Matcher message) {
  spawn(3, [&](World& world) {
    auto net = make_mlp();
    if (world.rank() == 1) change(*net);
    try {
      Ddp ddp(*net, world.group());
      FAIL() << "rank " << world.rank() << " accepted it";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), message);
    }
    Mlp good;
    Ddp ddp(good, world.group());
  });
}

TEST(Verify, B05_AParameterMore) {
  expect_refusal([](Mlp& net) { net.third->register_parameter("scale", torch::ones({2})); },
                 AllOf(HasSubstr("rank 0 has nothing (it has 6"), HasSubstr("rank 1"),
                       HasSubstr("'third.scale': float32 [2]")));
}

TEST(Verify, B06_AnotherShape) {
  expect_refusal([](Mlp& net) { net.replace_module("second", torch::nn::Linear(8, 9)); },
                 AllOf(HasSubstr("rank 0 has parameter 'second.weight': float32 [8, 8]"),
                       HasSubstr("rank 1 has parameter 'second.weight': float32 [9, 8]")));
}

TEST(Verify, B06_OtherStrides) {
  expect_refusal(
      [](Mlp& net) { net.first->weight.set_data(net.first->weight.t().contiguous().t()); },
      HasSubstr("rank 1 has parameter 'first.weight': float32 [8, 6] with strides [1, 8]"));
}

TEST(Verify, B06_AnotherDtype) {
  expect_refusal([](Mlp& net) { net.third->to(at::kDouble); },
                 AllOf(HasSubstr("'third.weight': float32"), HasSubstr("'third.weight': float64")));
}

// Each rank would write to the rows of its own batch, and nothing would bring them together.
TEST(Verify, AnEmbeddingWithMaxNorm) {
  for (const bool is_bag : {false, true}) {
    spawn(2, [&](World& world) {
      torch::nn::Sequential net;
      if (is_bag) {
        net->push_back(torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(9, 4).max_norm(1.0)));
      } else {
        net->push_back(torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 4).max_norm(1.0)));
      }
      const auto refused = AllOf(HasSubstr("parameter '0.weight' belongs to an Embedding with "),
                                 HasSubstr("renormalise all rows"));
      EXPECT_THAT(message_of<ConfigError>([&] { Ddp(net, world); }), refused);
      EXPECT_THAT(message_of<ConfigError>([&] { Fsdp(net, world.group()); }), refused);
      const Group one = world.group().split(world.rank());
      Ddp ddp(net, one);
    });
  }
}

TEST(Verify, AnotherRequiresGrad) {
  expect_refusal([](Mlp& net) { net.third->bias.requires_grad_(false); },
                 AllOf(HasSubstr("rank 0 has parameter 'third.bias': float32 [3], trainable"),
                       HasSubstr("rank 1 has parameter 'third.bias': float32 [3], frozen")));
}

TEST(Verify, AnotherName) {
  expect_refusal(
      [](Mlp& net) {
        net.unregister_module("third");
        net.register_module("last", net.third.ptr());
      },
      AllOf(HasSubstr("'third.weight'"), HasSubstr("'last.weight'")));
}

TEST(Verify, ABufferMore) {
  expect_refusal([](Mlp& net) { net.register_buffer("mean", at::zeros({3})); },
                 HasSubstr("rank 1 has buffer 'mean': float32 [3]"));
}

TEST(Verify, B04_NothingTrainable) {
  expect_refusal(
      [](Mlp& net) {
        for (auto& p : net.parameters()) p.requires_grad_(false);
      },
      AllOf(HasSubstr("rank 1: none of the module's 6 parameters"), HasSubstr("unfreeze")));
}

struct Elsewhere : torch::nn::Module {
  Elsewhere() { register_parameter("weight", torch::empty({8, 8}, at::kMeta)); }
};

TEST(Verify, B08_AParameterOnAnotherDevice) {
  expect_refusal([](Mlp& net) { net.replace_module("second", std::make_shared<Elsewhere>()); },
                 AllOf(HasSubstr("rank 1: parameter 'second.weight' is on meta"),
                       HasSubstr("communicates on cpu")));
}

TEST(Verify, NothingTrainableIsRefusedInAGroupOfOneToo) {
  spawn(1, [](World& world) {
    torch::nn::ReLU relu;
    EXPECT_THROW(Ddp(*relu, world.group()), ConfigError);
  });
}

struct Unregistered : torch::nn::Module {
  torch::nn::Linear layer{2, 2};
};

TEST(Verify, AModuleWithoutParametersMayHaveLayersThatAreNotRegistered) {
  spawn(1, [](World& world) {
    Unregistered net;
    EXPECT_THAT(message_of<ConfigError>([&] { Ddp(net, world.group()); }),
                AllOf(HasSubstr("none of the module's 0 parameters requires a gradient"),
                      HasSubstr("register_module()")));
  });
}

TEST(Verify, B11_BucketsOfNoBytesAreRefused) {
  spawn(1, [](World& world) {
    Mlp net;
    EXPECT_THROW(Ddp(net, world.group(), {.bucket_bytes = {0}}), ConfigError);
  });
}

// Rank 1's backward reaches nothing, so it never comes to the collective; it waits here until rank
// 0 has its error.
TEST(Verify, ALossThatReachesNoParameterIsNamedByThePeersDeadline) {
  int line[2];
  ASSERT_EQ(pipe(line), 0);
  const auto body = [&](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    char byte = 0;
    if (world.rank() == 1) {
      input(1).requires_grad_(true).sum().backward();
      EXPECT_EQ(read(line[0], &byte, 1), 1);
      return;
    }
    try {
      square_loss(net, 0).backward();
      ADD_FAILURE() << "nobody answered, and no error";
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("bucket 0"), HasSubstr("rank 1")));
    }
    EXPECT_EQ(write(line[1], &byte, 1), 1);
  };
  spawn(2, body, {.timeout = std::chrono::seconds(4)});
}

}  // namespace
}  // namespace lockstep::test
