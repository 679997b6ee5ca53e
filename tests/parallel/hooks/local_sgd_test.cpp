// Ranks of a subgroup stay together, whatever each of them uses; averages take in every parameter.
#include "lockstep/parallel/averager.h"
#include "lockstep/parallel/fused_sgd.h"
#include "lockstep/parallel/hooks.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;

bool alike_over(const Group& group, const at::Tensor& tensor) {
  at::Tensor first = tensor.detach().clone();
  group.broadcast(first).wait();
  return at::equal(first, tensor);
}

struct TableAndMlp : Mlp {
  TableAndMlp() {
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 6).sparse(true)));
  }
  torch::nn::Embedding table{nullptr};
};

TEST(LocalSgdSubgroup, StaysTogetherWhenOneRankDoesNotUseAParameter) {
  spawn(4, [](World& world) {
    const Group pair = world.group().split(world.rank() / 2);
    TableAndMlp net;
    Ddp ddp(net, world.group(),
            {.hook = std::make_shared<LocalSgd>(
                 LocalSgdOptions{.start_iteration = 0, .subgroup = pair})});
    torch::optim::SGD sgd(net.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      at::Tensor hidden = torch::tanh(net.first(input(world.rank(), step)));
      // Odd ranks leave out the second layer in odd steps; nobody uses the third one in step 0.
      if (world.rank() % 2 == 0 || step % 2 == 0) hidden = torch::tanh(net.second(hidden));
      if (step > 0) hidden = net.third(hidden);
      at::Tensor loss = hidden.square().mean();
      // Only even ranks look something up.
      if (world.rank() % 2 == 0) {
        loss = loss + net.table->forward(at::tensor({world.rank(), step})).square().mean();
      }
      loss.backward();
      EXPECT_EQ(net.third->bias.grad().defined(), step > 0);
      EXPECT_EQ(net.table->weight.grad().defined(), true);
      sgd.step();
    }
    for (const auto& item : net.named_parameters()) {
      EXPECT_TRUE(alike_over(pair, item.value())) << item.key();
    }
    EXPECT_FALSE(alike_over(world.group(), net.first->weight) && world.rank() == 3);
  });
}

TEST(LocalSgdSubgroup, ADividedOptimizerIsRefused) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group(), {.hook = std::make_shared<LocalSgd>()});
    const auto make = zero<FusedSGD>(torch::optim::SGDOptions(0.1));
    EXPECT_THROW(ZeroOptimizer(net.parameters(), world.group(), make), ConfigError);
    Mlp other;
    ZeroOptimizer sgd(other.parameters(), world.group(), make);
    Ddp later(other, world.group(), {.hook = std::make_shared<LocalSgd>()});
    square_loss(other, world.rank()).backward();
    EXPECT_THROW(sgd.step(), ConfigError);
  });
}

// Parameters of every kind there is.
struct Assorted : torch::nn::Module {
  Assorted() {
    complex = register_parameter("complex", at::zeros({3}, at::kComplexFloat));
    shared = register_parameter("shared", at::zeros({2, 3}));
    again = register_parameter("again", shared);
    empty = register_parameter("empty", at::zeros({0, 2}));
    transposed = register_parameter("transposed", at::zeros({3, 2}).t());
    gapped = register_parameter("gapped", at::zeros({4, 4}).slice(1, 0, 4, 2));
    frozen = register_parameter("frozen", at::zeros({2}), /*requires_grad=*/false);
    integer = register_parameter("integer", at::zeros({2}, at::kLong), /*requires_grad=*/false);
    flag = register_buffer("flag", at::zeros({2}, at::kBool));
    count = register_buffer("count", at::zeros({2}, at::kLong));
  }
  at::Tensor complex, shared, again, empty, transposed, gapped, frozen, integer, flag, count;
};

TEST(Averager, TakesInParametersOfEveryKindOnce) {
  spawn(3, [](World& world) {
    const at::NoGradGuard no_grad;
    Assorted net;
    for (const auto& parameter : net.parameters()) parameter.fill_(world.rank());
    net.complex.copy_(
        at::complex(at::full({3}, world.rank() + 0.0F), at::full({3}, 10.0F * world.rank())));
    net.count.fill_(world.rank());
    net.flag.fill_(world.rank() == 1);
    parallel::Averager averager(net, {{world.group(), 1}});
    EXPECT_TRUE(averager.step());
    EXPECT_TRUE(at::equal(at::real(net.complex), at::ones({3})));
    EXPECT_TRUE(at::equal(at::imag(net.complex), at::full({3}, 10.0F)));
    for (const auto& parameter : {net.shared, net.again, net.transposed, net.gapped, net.frozen}) {
      EXPECT_TRUE(at::equal(parameter, at::ones_like(parameter)));
    }
    EXPECT_TRUE(at::equal(net.integer, at::full({2}, world.rank(), at::kLong)));
    EXPECT_TRUE(at::equal(net.count, at::full({2}, world.rank(), at::kLong)));
    EXPECT_EQ(net.flag[0].item<bool>(), world.rank() == 1);
  });
}

TEST(Averager, TakesInTheParametersThatThereAreNow) {
  spawn(2, [](World& world) {
    auto net = std::make_shared<Mlp>();
    parallel::Averager averager(net, {{world.group(), 1}});
    net->second = net->replace_module("second", torch::nn::Linear(8, 8));
    const auto added = net->register_parameter("added", torch::zeros({2}));
    {
      const at::NoGradGuard no_grad;
      net->second->weight.fill_(world.rank());
      added.fill_(world.rank());
    }
    EXPECT_TRUE(averager.step());
    EXPECT_TRUE(at::equal(net->second->weight, at::full({8, 8}, 0.5F)));
    EXPECT_TRUE(at::equal(added, at::full({2}, 0.5F)));
    net.reset();
    EXPECT_THAT(message_of<ConfigError>([&] { averager.step(); }),
                HasSubstr("[averager] the module is not there any more"));
  });
}

// LOCKSTEP_FINGERPRINT counts passes of all ranks.
TEST(LocalSgdLog, HasNoFingerprintOfPassesThatDoNotCommunicate) {
  spawn_bare(2, [](int rank) {
    ::setenv("LOCKSTEP_FINGERPRINT", "1", 1);
    ::setenv("LOCKSTEP_LOG", "info", 1);  // read once, before anything is logged
    World world = World::from_env();
    Mlp net;
    Ddp ddp(net, world.group(),
            {.hook = std::make_shared<LocalSgd>(LocalSgdOptions{.start_iteration = 2})});
    ::testing::internal::CaptureStderr();
    for (int pass = 0; pass < 5; ++pass) square_loss(net, rank, pass).backward();
    const std::string log = ::testing::internal::GetCapturedStderr();
    size_t lines = 0;
    for (size_t at = 0; (at = log.find("parameters and buffers", at)) != std::string::npos; ++at)
      ++lines;
    EXPECT_EQ(lines, rank == 0 ? 2U : 0U) << log;
  });
}

}  // namespace
}  // namespace lockstep::test
