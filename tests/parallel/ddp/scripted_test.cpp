// Scripted modules: buffers that forward() assigns to, and BatchNorm.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/lockstep.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;

at::Tensor rows(int64_t rank, int64_t step) {
  return at::randn({4, 6}, at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + rank)),
                   at::kDouble);
}

// TorchScript puts another tensor in the place of a buffer that is assigned to.
torch::jit::Module averaging_net() {
  torch::jit::Module net("Net");
  torch::manual_seed(0);
  net.register_parameter("weight", at::randn({6, 3}, at::kDouble).requires_grad_(),
                         /*is_buffer=*/false);
  net.register_buffer("run", at::zeros({3}, at::kDouble));
  net.define(R"(
def forward(self, x):
  h = torch.mm(x, self.weight)
  self.run = 0.9 * self.run + 0.1 * torch.mean(h.detach(), [0])
  return torch.sum((h - self.run) * h)
)");
  return net;
}

at::Tensor loss_of(torch::jit::Module& net, int64_t rank, int64_t step) {
  return net.forward({rows(rank, step)}).toTensor();
}
at::Tensor run_of(const torch::jit::Module& net) { return net.attr("run").toTensor(); }
at::Tensor gradient_of(const torch::jit::Module& net) {
  return net.attr("weight").toTensor().grad();
}

at::Tensor mean_of(const std::vector<at::Tensor>& tensors) { return at::stack(tensors).mean(0); }

TEST(Scripted, ABufferThatForwardAssignsTo) {
  for (const Buffers mode : {Buffers::Broadcast, Buffers::Average, Buffers::None}) {
    spawn(2, [&](World& world) {
      auto net = averaging_net();
      Ddp ddp(net, world, {.buffers = mode});
      std::vector<torch::jit::Module> usual{averaging_net(), averaging_net()};
      for (int step = 0; step < 3; ++step) {
        ddp.zero_grad();
        const auto before = ddp.fingerprint();
        loss_of(net, world.rank(), step).backward();
        EXPECT_NE(ddp.fingerprint(), before);
        for (int rank = 0; rank < 2; ++rank) {
          usual[rank].attr("weight").toTensor().mutable_grad() = at::Tensor();
          loss_of(usual[rank], rank, step).backward();
        }
        EXPECT_TRUE(at::allclose(gradient_of(net),
                                 mean_of({gradient_of(usual[0]), gradient_of(usual[1])})));
        const at::Tensor mean = mean_of({run_of(usual[0]), run_of(usual[1])}).clone();
        for (auto& each : usual) {
          if (mode == Buffers::Broadcast) each.setattr("run", run_of(usual[0]).clone());
          if (mode == Buffers::Average) each.setattr("run", mean.clone());
        }
        EXPECT_TRUE(at::allclose(run_of(net), run_of(usual[world.rank()]))) << step;
      }
    });
  }
}

// What is sent goes into the buffer, not into what forward() returned, which it shares memory with.
TEST(Scripted, ABufferThatIsAPartOfTheResult) {
  spawn(2, [](World& world) {
    torch::jit::Module net("Last");
    net.register_parameter("weight", at::ones({6, 6}, at::kDouble).requires_grad_(), false);
    net.register_buffer("last", at::zeros({4, 6}, at::kDouble));
    net.define(R"(
def forward(self, x):
  y = torch.mm(x, self.weight)
  self.last = y.detach()
  return y
)");
    Ddp ddp(net, world);
    const at::Tensor x = at::full({4, 6}, 1 + world.rank(), at::kDouble);
    const at::Tensor y = net.forward({x}).toTensor();
    y.sum().backward();
    EXPECT_TRUE(at::equal(y, at::full({4, 6}, 6 + 6 * world.rank(), at::kDouble)));
    EXPECT_TRUE(at::equal(net.attr("last").toTensor(), at::full({4, 6}, 6, at::kDouble)));
  });
}

TEST(Scripted, ABufferThatOneRankAssignsToBetweenSteps) {
  spawn(2, [](World& world) {
    auto net = averaging_net();
    Ddp ddp(net, world);
    if (world.rank() == 1) {
      const at::NoGradGuard no_grad;
      loss_of(net, 1, 0);
    }
    EXPECT_EQ(run_of(net).any().item<bool>(), world.rank() == 1);
    ddp.zero_grad();
    ddp.sync_buffers();
    EXPECT_FALSE(run_of(net).any().item<bool>());
  });
}

TEST(Scripted, ABufferThatLanesAssignTo) {
  const auto trained = [](const Group& group) {
    const torch::jit::GraphOptimizerEnabledGuard as_written(false);
    auto net = averaging_net();
    Ddp ddp(net, group, {.lanes = 4});
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      for (const Lane lane : ddp.lanes(StepKey{.step = step}))
        loss_of(net, lane.index, step).backward();
    }
    return ddp.fingerprint();
  };
  spawn(2, [&](World& world) { EXPECT_EQ(trained(world.group()), trained(Group())); });
}

// What TorchScript compiles after the first calls has other roundings.
TEST(Scripted, LanesOfAGraphThatIsCompiledAnewAreAWarning) {
  const auto warnings = [](const Group& group, bool optimizes) {
    const torch::jit::GraphOptimizerEnabledGuard guard(optimizes);
    auto net = averaging_net();
    Ddp ddp(net, group, {.lanes = 4});
    ::testing::internal::CaptureStderr();
    for (int step = 0; step < 4; ++step) {
      ddp.zero_grad();
      for (const Lane lane : ddp.lanes(StepKey{.step = step}))
        loss_of(net, lane.index, step).backward();
    }
    const std::string text = ::testing::internal::GetCapturedStderr();
    const std::string start = "[ddp] TorchScript has compiled forward()";
    const size_t at = text.find(start);
    if (at == text.npos) return 0;
    EXPECT_THAT(text, HasSubstr("setGraphExecutorOptimize(false)"));
    return text.find(start, at + 1) == text.npos ? 1 : 2;
  };
  spawn(2, [&](World& world) {
    EXPECT_EQ(warnings(world.group(), true), world.rank() == 0 ? 1 : 0);
    EXPECT_EQ(warnings(world.group(), false), 0);
    EXPECT_EQ(warnings(Group(), true), 1);
  });
}

TEST(Scripted, ABufferOfOtherSizesIsRefused) {
  spawn(2, [](World& world) {
    auto net = averaging_net();
    Ddp ddp(net, world);
    net.setattr("run", at::zeros({4, 3}, at::kDouble));
    const auto text = message_of<ConfigError>([&] { loss_of(net, world.rank(), 0).backward(); });
    EXPECT_THAT(text, HasSubstr("buffer 'run' was replaced by another tensor"));
    EXPECT_THAT(text, HasSubstr("DdpOptions::ignore"));
  });
}

// As torch.jit.script() names it.
torch::jit::Module normalising_net() {
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  torch::jit::Module norm("__torch__.torch.nn.modules.batchnorm.BatchNorm1d", unit);
  norm.register_attribute("training", c10::BoolType::get(), true);
  norm.register_buffer("running_mean", at::zeros({6}, at::kDouble));
  norm.register_buffer("running_var", at::ones({6}, at::kDouble));
  norm.define(R"(
def forward(self, x):
  return torch.batch_norm(x, None, None, self.running_mean, self.running_var,
                          self.training, 0.1, 1e-5, False)
)");
  torch::jit::Module net("__torch__.Net", unit);
  torch::manual_seed(0);
  net.register_parameter("weight", at::randn({6, 6}, at::kDouble).requires_grad_(),
                         /*is_buffer=*/false);
  net.register_module("norm", norm);
  net.define(R"(
def forward(self, x):
  return torch.sum(torch.pow(self.norm.forward(torch.mm(x, self.weight)), 3))
)");
  return net;
}

TEST(Scripted, TwoForwardsThroughBatchNormMayHaveTheirBackwardsLater) {
  spawn(2, [](World& world) {
    const auto train = [&](bool two_at_once) {
      auto net = normalising_net();
      Ddp ddp(net, world);
      std::vector<at::Tensor> gradients;
      const auto step_of = [&](const at::Tensor& loss) {
        ddp.zero_grad();
        loss.backward();
        gradients.push_back(gradient_of(net));
      };
      const auto first = loss_of(net, world.rank(), 0);
      if (!two_at_once) step_of(first);
      const auto second = loss_of(net, world.rank(), 1);
      if (two_at_once) step_of(first);
      step_of(second);
      const auto norm = net.attr("norm").toModule();
      EXPECT_NE(norm.attr("running_mean").toTensor().abs().max().item<double>(), 0);
      return gradients;
    };
    const auto usual = train(false), later = train(true);
    for (size_t i = 0; i < usual.size(); ++i) EXPECT_TRUE(at::equal(usual[i], later[i])) << i;
  });
}

}  // namespace
}  // namespace lockstep::test
