// FusedAdam and FusedAdamW are torch's optimizers, faster. Their bits are held against Python's in
// python_test.cpp.
#include "lockstep/parallel/fused_adam.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

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
using UsualAdam = Of<torch::optim::Adam, torch::optim::AdamOptions>;
using UsualAdamW = Of<torch::optim::AdamW, torch::optim::AdamWOptions>;
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
    expect_close(trained<Fused>(options), trained<UsualAdam>(options));
    auto with_largest = options;
    with_largest.amsgrad(true);
    expect_close(trained<Fused>(with_largest), trained<UsualAdam>(with_largest));
  });
}

TEST(FusedAdam, AgreesWithTorchAdamW) {
  isolated([] {
    const auto options = torch::optim::AdamWOptions(1e-3).weight_decay(0.1).eps(1e-6);
    expect_close(trained<FusedW>(options), trained<UsualAdamW>(options));
  });
}

// Sizes around whole vectors and blocks; libtorch's kernel on one thread.
TEST(FusedAdam, BitsAreThoseOfTorchsKernel) {
  isolated([] {
    at::set_num_threads(1);
    for (const auto& [decay, beta1] :
         {std::pair{0.0, 0.9}, {0.1, 0.9}, {0.0, 0.5}, {0.1, 0.5}, {0.0, 0.0}, {0.1, 0.0}}) {
      for (const int64_t count : {1, 7, 8, 23, 64, 1000, 1024, 1031, 5000, 100003}) {
        const auto parameter = at::randn({count}).requires_grad_(true);
        const auto twin = parameter.detach().clone(), twin_average = at::zeros({count}),
                   twin_square = at::zeros({count});
        FusedAdam adam({parameter},
                       torch::optim::AdamOptions(1e-2).weight_decay(decay).betas({beta1, 0.999}));
        for (int step = 1; step <= 3; ++step) {
          const auto gradient = at::randn({count});
          parameter.mutable_grad() = gradient;
          adam.step();
          at::_fused_adam_({twin}, {gradient}, {twin_average}, {twin_square}, {},
                           {at::scalar_tensor(step, at::kFloat)}, 1e-2, beta1, 0.999, decay, 1e-8,
                           /*amsgrad=*/false, /*maximize=*/false);
          EXPECT_TRUE(at::equal(parameter, twin)) << count << " elements, step " << step;
        }
        FusedAdamW decoupled(
            {parameter},
            torch::optim::AdamWOptions(1e-2).weight_decay(decay).betas({beta1, 0.999}));
        decoupled.step();
        at::_fused_adamw_({twin}, {parameter.grad()}, {twin_average.zero_()}, {twin_square.zero_()},
                          {}, {at::ones({})}, 1e-2, beta1, 0.999, decay, 1e-8, false, false);
        EXPECT_TRUE(at::equal(parameter, twin)) << count << " elements, AdamW";
      }
    }
  });
}

TEST(FusedAdam, BitsDoNotDependOnTheNumberOfThreads) {
  isolated([] {
    const auto gradient = at::randn({1 << 20});
    std::vector<at::Tensor> results;
    for (const int threads : {1, 2, 3}) {
      at::set_num_threads(threads);
      const auto parameter = at::ones({1 << 20}).requires_grad_(true);
      parameter.mutable_grad() = gradient;
      FusedAdam({parameter}, 1e-2).step();
      results.push_back(parameter.detach());
    }
    EXPECT_TRUE(at::equal(results[0], results[1]));
    EXPECT_TRUE(at::equal(results[0], results[2]));
  });
}

// What our kernel does not take goes to libtorch's, in one step with the others.
TEST(FusedAdam, MixedDtypesStepTogether) {
  isolated([] {
    std::vector<at::Tensor> parameters;
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      parameters.push_back(at::ones({100}, dtype).requires_grad_(true));
      parameters.back().mutable_grad() = at::ones({100}, dtype);
    }
    FusedAdam adam(parameters, 0.5);
    adam.step();
    for (const auto& parameter : parameters) {
      EXPECT_TRUE(at::allclose(parameter.to(at::kDouble), at::full({100}, 0.5, at::kDouble), 1e-5));
    }
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
