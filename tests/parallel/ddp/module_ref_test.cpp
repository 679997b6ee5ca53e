// Ddp takes a module however the program holds it.
#include "lockstep/checkpoint/module_ref.h"

#include "lockstep/parallel/check_same.h"
#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/fsdp.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;

struct HeldNetImpl : Mlp {};
TORCH_MODULE(HeldNet);

TEST(ModuleRef, AHolderASharedPointerAndAReferenceAreTheSame) {
  spawn(2, [](World& world) {
    const auto want = average_gradients(2, make_mlp, square_loss_of_mlp);
    const auto expect_average = [&](Mlp& net) {
      square_loss(net, world.rank()).backward();
      expect_equal(gradients(net), want);
    };
    HeldNet holder;
    {
      Ddp ddp(holder, world);
      expect_average(*holder);
    }
    {
      Ddp ddp(*holder, world);
      ddp.zero_grad();
      expect_average(*holder);
    }
    const auto shared = make_mlp();
    Ddp ddp(shared, world, {.unused = Unused::Error});
    expect_average(*shared);
  });
}

TEST(ModuleRef, ALayerOfTorch) {
  spawn(2, [](World& world) {
    torch::nn::Linear layer(2, 3);
    Ddp ddp(layer, world);
    layer(torch::full({1, 2}, world.rank() + 1.0)).sum().backward();
    EXPECT_TRUE(at::equal(layer->weight.grad(), torch::full({3, 2}, 1.5)));
    torch::nn::Sequential sequential(torch::nn::Linear(2, 2), torch::nn::ReLU());
    Ddp second(sequential, world);
    EXPECT_EQ(second.buckets()[0].names.size(), 2U);
  });
}

// Two classes in it have a pointer to their owner, of which make_shared() then sets neither.
struct OwnedTwiceImpl : Mlp, std::enable_shared_from_this<OwnedTwiceImpl> {};
TORCH_MODULE(OwnedTwice);

TEST(ModuleRef, ItKnowsThatASharedModuleIsGoneAlsoOfAClassThatHidesItsOwner) {
  auto shared = std::make_shared<OwnedTwiceImpl>();
  ASSERT_TRUE(static_cast<torch::nn::Module&>(*shared).weak_from_this().expired());
  const ModuleRef by_pointer(shared);
  EXPECT_FALSE(by_pointer.has_expired());
  shared.reset();
  EXPECT_TRUE(by_pointer.has_expired());
  OwnedTwice holder;
  const ModuleRef by_holder(holder);
  EXPECT_FALSE(by_holder.has_expired());
  holder = OwnedTwice(nullptr);
  EXPECT_TRUE(by_holder.has_expired());
  // A pointer that owns nothing says nothing.
  Mlp net;
  EXPECT_FALSE(ModuleRef(std::shared_ptr<Mlp>(std::shared_ptr<void>(), &net)).has_expired());
}

TEST(ModuleRef, AnEmptyHolderIsRefused) {
  spawn(1, [](World& world) {
    HeldNet holder{nullptr};
    EXPECT_THAT(message_of<ConfigError>([&] { Ddp ddp(holder, world); }), HasSubstr("is empty"));
    EXPECT_THROW(Ddp(std::shared_ptr<Mlp>(), world), ConfigError);
  });
}

torch::jit::Module script() {
  torch::jit::Module inner("Inner"), module("Outer");
  torch::manual_seed(0);
  inner.register_parameter("weight", torch::randn({6, 3}).requires_grad_(), /*is_buffer=*/false);
  inner.define("def forward(self, x):\n  return torch.mm(x, self.weight)\n");
  module.register_module("inner", inner);
  module.register_parameter("bias", torch::randn({3}).requires_grad_(), /*is_buffer=*/false);
  module.register_buffer("offset", torch::ones({3}));
  module.define(
      "def forward(self, x):\n  return self.inner.forward(x) + self.bias + self.offset\n");
  return module;
}

at::Tensor script_loss(torch::jit::Module& module, int rank) {
  return module.forward({input(rank)}).toTensor().square().mean();
}

TEST(ModuleRef, AScriptModule) {
  spawn(2, [](World& world) {
    auto module = script();
    if (world.rank() == 1) {
      const at::NoGradGuard no_grad;
      for (const auto& tensor : module.parameters()) tensor.zero_();
      for (const auto& tensor : module.buffers()) tensor.zero_();
    }
    Ddp ddp(module, world);
    EXPECT_THAT(ddp.buckets()[0].names, ::testing::UnorderedElementsAre("inner.weight", "bias"));
    EXPECT_TRUE(at::equal(module.attr("offset").toTensor(), torch::ones({3})));
    std::vector<std::vector<at::Tensor>> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      auto alone = script();
      script_loss(alone, rank).backward();
      ranks.push_back({alone.attr("bias").toTensor().grad(),
                       alone.attr("inner").toModule().attr("weight").toTensor().grad()});
    }
    for (int pass = 0; pass < 2; ++pass) {
      ddp.zero_grad();
      script_loss(module, world.rank()).backward();
      EXPECT_TRUE(
          at::equal(module.attr("bias").toTensor().grad(), (ranks[0][0] + ranks[1][0]) / 2));
      EXPECT_TRUE(at::equal(module.attr("inner").toModule().attr("weight").toTensor().grad(),
                            (ranks[0][1] + ranks[1][1]) / 2));
    }
    check_same(module, world);
    check_finite(module, world);
    if (world.rank() == 1) {
      const at::NoGradGuard no_grad;
      module.attr("offset").toTensor().add_(1);
    }
    EXPECT_THAT(message_of<ConfigError>([&] { check_same(module, world); }), HasSubstr("offset"));
    module.setattr("bias", torch::randn({3}).requires_grad_(true));
    EXPECT_THAT(message_of<ConfigError>([&] { script_loss(module, world.rank()).backward(); }),
                HasSubstr("parameter 'bias' was replaced"));
  });
}

TEST(ModuleRef, AScriptModuleIsNotDividedIntoUnits) {
  spawn(2, [](World& world) {
    const auto module = script();
    EXPECT_THAT(message_of<ConfigError>([&] { Fsdp fsdp(module, world); }),
                HasSubstr("has no layers that lockstep::call() could run"));
  });
}

}  // namespace
}  // namespace lockstep::test
