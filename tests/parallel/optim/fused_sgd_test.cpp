// FusedSGD is Python's SGD(fused=True), to the bit, and torch::optim::SGD within roundings.
#include "lockstep/parallel/fused_sgd.h"

#include <sstream>

#include "parallel/python.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using torch::optim::SGDOptions;

// In the order of reference.py.
std::vector<SGDOptions> sgd_settings() {
  return {SGDOptions(0.1), SGDOptions(0.1).weight_decay(0.01),
          SGDOptions(0.05).momentum(0.9).dampening(0.2),
          SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(0.1)};
}

template <typename Optimizer>
std::vector<at::Tensor> after_sgd(const SGDOptions& options, int steps = 20) {
  Mlp net;
  Optimizer sgd(net.parameters(), options);
  for (int step = 0; step < steps; ++step) {
    sgd.zero_grad();
    square_loss(net, 0, step).backward();
    sgd.step();
  }
  return net.parameters();
}

TEST(FusedSGD, BitsAreThoseOfPythonsFusedOne) {
  const auto python = python_numbers("fused_sgd");
  isolated([&] {
    size_t at = 0;
    for (const auto& options : sgd_settings()) {
      for (const auto& parameter : after_sgd<FusedSGD>(options)) {
        const auto values = parameter.detach().flatten().to(at::kDouble).contiguous();
        for (int64_t i = 0; i < values.numel(); ++i) {
          ASSERT_EQ(values.const_data_ptr<double>()[i], python.at(at++));
        }
      }
    }
    EXPECT_EQ(at, python.size());
  });
}

// The same formula rounded in another order.
TEST(FusedSGD, AgreesWithTorchSGD) {
  isolated([] {
    for (const auto& options : sgd_settings()) {
      const auto got = after_sgd<FusedSGD>(options), want = after_sgd<torch::optim::SGD>(options);
      for (size_t i = 0; i < want.size(); ++i)
        EXPECT_TRUE(at::allclose(got[i], want[i], 1e-5, 1e-6));
    }
  });
}

// A parameter whose first gradient comes later begins its momentum then.
TEST(FusedSGD, ParametersMayJoinLaterOrNever) {
  isolated([] {
    Mlp fused_net, net;
    const auto options = SGDOptions(0.05).momentum(0.9).dampening(0.3);
    FusedSGD fused(fused_net.parameters(), options);
    torch::optim::SGD sgd(net.parameters(), options);
    const auto never = fused_net.third->weight.detach().clone();
    for (int step = 0; step < 6; ++step) {
      for (auto* m : {&fused_net, &net}) {
        m->zero_grad();
        const auto hidden = m->first(input(0, step));
        (step < 3 ? hidden : m->second(hidden)).square().mean().backward();
      }
      fused.step();
      sgd.step();
    }
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_TRUE(at::allclose(fused_net.parameters()[i], net.parameters()[i], 1e-5, 1e-6));
    }
    EXPECT_TRUE(at::equal(fused_net.third->weight, never));
  });
}

TEST(FusedSGD, StateIsExchangedWithTorchSGD) {
  isolated([] {
    const auto options = SGDOptions(0.05).momentum(0.9);
    Mlp net;
    torch::optim::SGD sgd(net.parameters(), options);
    FusedSGD fused(net.parameters(), options);
    square_loss(net, 0).backward();
    sgd.step();
    std::stringstream file;
    torch::serialize::OutputArchive out;
    sgd.save(out);
    out.save_to(file);
    torch::serialize::InputArchive in;
    in.load_from(file);
    fused.load(in);
    const auto before = net.first->weight.detach().clone();
    const auto buffer = [&](torch::optim::Optimizer& optimizer) {
      return static_cast<const torch::optim::SGDParamState&>(
                 *optimizer.state().at(net.first->weight.unsafeGetTensorImpl()))
          .momentum_buffer();
    };
    EXPECT_TRUE(at::equal(buffer(fused), buffer(sgd)));
    net.zero_grad();
    square_loss(net, 0, 1).backward();
    const auto want = buffer(sgd) * 0.9 + net.first->weight.grad();
    fused.step();
    EXPECT_TRUE(at::allclose(buffer(fused), want, 1e-6, 1e-8));
    EXPECT_TRUE(at::allclose(net.first->weight, before - 0.05 * want, 1e-6, 1e-8));
  });
}

TEST(FusedSGD, TransposedAndSparseGradients) {
  isolated([] {
    auto weight = torch::zeros({2, 3}).requires_grad_(true),
         twin = torch::zeros({2, 3}).requires_grad_(true);
    weight.mutable_grad() = at::arange(6.0).view({3, 2}).t();
    twin.mutable_grad() = weight.grad().contiguous();
    for (auto* each : {&weight, &twin}) FusedSGD({*each}, SGDOptions(0.1).momentum(0.5)).step();
    EXPECT_TRUE(at::equal(weight, twin));

    torch::nn::Embedding table(torch::nn::EmbeddingOptions(5, 2).sparse(true));
    table->forward(at::tensor({1, 3})).sum().backward();
    FusedSGD sgd({weight, table->weight}, SGDOptions(0.1));
    const auto before = weight.detach().clone();
    try {
      sgd.step();
      FAIL() << "accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(),
                  ::testing::HasSubstr("[fused_sgd] parameter 1 of group 0 has a sparse"));
    }
    EXPECT_TRUE(at::equal(weight, before));
  });
}

}  // namespace
}  // namespace lockstep::test
