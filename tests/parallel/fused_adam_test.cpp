// FusedAdam and FusedAdamW are torch's optimizers, faster. Their bits are held against Python's in
// python_test.cpp.
#include "lockstep/parallel/fused_adam.h"

#include <sstream>

#include "lockstep/core/error.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

template <typename Optimizer>
std::vector<at::Tensor> trained(typename Optimizer::Options options, int steps = 20) {
  Mlp net;
  typename Optimizer::Class optimizer(net.parameters(), options);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    square_loss(net, 0, step).backward();
    optimizer.step();
  }
  return net.parameters();
}

template <typename C, typename O>
struct Of {
  using Class = C;
  using Options = O;
};
using Adam = Of<torch::optim::Adam, torch::optim::AdamOptions>;
using AdamW = Of<torch::optim::AdamW, torch::optim::AdamWOptions>;
using Fused = Of<FusedAdam, torch::optim::AdamOptions>;
using FusedW = Of<FusedAdamW, torch::optim::AdamWOptions>;

// The same formula rounded in another order: 20 steps of 1e-3 apart by a few units in the last
// place.
void expect_close(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::allclose(got[i], want[i], 1e-5, 1e-6));
}

TEST(FusedAdam, AgreesWithTorchAdam) {
  isolated([] {
    const auto options = torch::optim::AdamOptions(1e-3).weight_decay(0.1).betas({0.8, 0.99});
    expect_close(trained<Fused>(options), trained<Adam>(options));
    auto with_largest = options;
    with_largest.amsgrad(true);
    expect_close(trained<Fused>(with_largest), trained<Adam>(with_largest));
  });
}

TEST(FusedAdam, AgreesWithTorchAdamW) {
  isolated([] {
    const auto options = torch::optim::AdamWOptions(1e-3).weight_decay(0.1).eps(1e-6);
    expect_close(trained<FusedW>(options), trained<AdamW>(options));
  });
}

TEST(FusedAdam, GroupsHaveTheirOwnOptions) {
  isolated([] {
    Mlp net;
    const auto before = net.parameters()[0].detach().clone();
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector{net.parameters()[0]},
                        std::make_unique<torch::optim::AdamOptions>(0.0));
    groups.emplace_back(std::vector{net.parameters()[1]});
    FusedAdam adam(groups, torch::optim::AdamOptions(1e-2));
    const auto bias = net.parameters()[1].detach().clone();
    square_loss(net, 0).backward();
    adam.step();
    EXPECT_TRUE(at::equal(net.parameters()[0], before));
    EXPECT_FALSE(at::equal(net.parameters()[1], bias));
  });
}

TEST(FusedAdam, ParametersWithoutAGradientAreLeftAlone) {
  isolated([] {
    Mlp net;
    FusedAdam adam(net.parameters());
    net.first(input(0)).sum().backward();
    const auto before = net.third->weight.detach().clone();
    adam.step();
    EXPECT_TRUE(at::equal(net.third->weight, before));
    EXPECT_EQ(adam.state().size(), 2U);
  });
}

// A parameter that joins later starts at step 1 while the others go on.
TEST(FusedAdam, StepsAreCountedByParameter) {
  isolated([] {
    Mlp fused_net, net;
    FusedAdam fused(fused_net.parameters(), 1e-3);
    torch::optim::Adam adam(net.parameters(), 1e-3);
    for (int step = 0; step < 6; ++step) {
      for (auto* m : {&fused_net, &net}) {
        m->zero_grad();
        (step < 3 ? m->first(input(0, step)).square().mean() : square_loss(*m, 0, step)).backward();
      }
      fused.step();
      adam.step();
    }
    expect_close(fused_net.parameters(), net.parameters());
  });
}

TEST(FusedAdam, TransposedGradientsMeetTheRightElements) {
  isolated([] {
    auto weight = torch::zeros({2, 3}).requires_grad_(true);
    auto twin = torch::zeros({2, 3}).requires_grad_(true);
    weight.mutable_grad() = at::arange(6.0).view({3, 2}).t();
    twin.mutable_grad() = weight.grad().contiguous();
    for (auto* parameter : {&weight, &twin}) FusedAdam({*parameter}, 1e-2).step();
    EXPECT_TRUE(at::equal(weight, twin));
  });
}

TEST(FusedAdam, StateIsExchangedWithTorchAdam) {
  isolated([] {
    Mlp net;
    torch::optim::Adam adam(net.parameters(), 1e-3);
    square_loss(net, 0).backward();
    adam.step();
    std::stringstream file;
    torch::serialize::OutputArchive out;
    adam.save(out);
    out.save_to(file);
    torch::serialize::InputArchive in;
    in.load_from(file);
    FusedAdam fused(net.parameters(), 1e-3);
    fused.load(in);
    const auto& state = static_cast<const torch::optim::AdamParamState&>(
        *fused.state().at(net.parameters()[0].unsafeGetTensorImpl()));
    EXPECT_EQ(state.step(), 1);
    fused.step();
    EXPECT_EQ(state.step(), 2);
  });
}

TEST(FusedAdam, ASparseGradientIsRefusedBeforeAnythingChanged) {
  isolated([] {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(5, 2).sparse(true));
    auto dense = torch::ones({2}).requires_grad_(true);
    (table->forward(at::tensor({1, 3})).sum() + dense.sum()).backward();
    FusedAdam adam({dense, table->weight}, 1e-2);
    try {
      adam.step();
      FAIL() << "accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(),
                  ::testing::HasSubstr("parameter 1 of group 0 has a sparse gradient"));
    }
    EXPECT_TRUE(at::equal(dense, at::ones({2})));
  });
}

}  // namespace
}  // namespace lockstep::test
