// Modules that are built without memory get the values of modules that are built with it.
#include "lockstep/parallel/deferred_init.h"

#include "lockstep/parallel/fused_adam.h"
#include "parallel/counted_memory.h"
#include "parallel/fsdp/models.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using parallel::is_deferred;

// What constructors do to parameters.
struct EveryWayImpl : torch::nn::Module {
  EveryWayImpl() {
    using namespace torch::nn;  // NOLINT
    register_module("linear", Linear(60, 50));
    register_module("words", Embedding(EmbeddingOptions(70, 40).padding_idx(3)));
    register_module("convolution", Conv2d(Conv2dOptions(8, 16, 5)));
    register_module("norm", BatchNorm1d(2000));
    register_module("lstm", LSTM(LSTMOptions(30, 30).num_layers(2)));
    const torch::NoGradGuard no_grad;
    auto changed = register_parameter("changed", torch::empty({40, 40}));
    torch::nn::init::xavier_normal_(changed);
    changed.mul_(2).select(0, 7).fill_(5);
    changed.t().narrow(0, 3, 10).uniform_(-1, 1);
    register_parameter("scaled", torch::randn({40, 40}) * 0.02);
    register_parameter("drawn", torch::rand({40, 40}, torch::kDouble).clamp_(0.2, 0.8));
    auto orthogonal = register_parameter("orthogonal", torch::empty({40, 40}));
    torch::nn::init::orthogonal_(orthogonal);
    auto copied = register_parameter("copied", torch::zeros({40, 40}));
    copied.copy_(changed);
    register_parameter("turned", torch::full({40, 50}, 0.5).t());
    register_buffer("positions", torch::arange(3000).to(torch::kFloat).div(7).view({30, 100}));
    register_parameter("small", torch::randn({4}));
    auto complex = register_parameter("complex", torch::empty({40, 40}, torch::kComplexFloat));
    torch::view_as_real(complex).normal_(0, 0.02);
    torch::real(complex).select(0, 3).fill_(1);
    auto turned_complex = torch::full({40, 40}, c10::complex<double>(1, 2), torch::kComplexFloat);
    turned_complex.conj().narrow(0, 0, 4).mul_(c10::complex<double>(0, 3));
    torch::imag(turned_complex).select(0, 9).fill_(2);
    register_parameter("turned_complex", turned_complex);
  }
};
TORCH_MODULE(EveryWay);

TEST(DeferredInit, HasTheBitsOfConstructionWithMemory) {
  isolated([] {
    torch::manual_seed(8);
    const EveryWay usual;
    const at::Tensor after = torch::rand({3});
    torch::manual_seed(8);
    const EveryWay net = [] {
      const DeferredInit deferred;
      return EveryWay();
    }();
    EXPECT_TRUE(at::equal(torch::rand({3}), after));
    const auto by_name = net->named_parameters();
    for (const char* name : {"linear.weight", "words.weight", "convolution.weight",
                             "lstm.weight_hh_l1", "drawn", "turned"}) {
      EXPECT_TRUE(is_deferred(by_name[name])) << name;
      EXPECT_TRUE(by_name[name].requires_grad()) << name;
    }
    EXPECT_FALSE(is_deferred(by_name["small"]));
    EXPECT_THAT(message_of<c10::Error>([&] { by_name["linear.weight"].sum(); }),
                ::testing::HasSubstr("built under DeferredInit and has no memory yet"));
    materialize(net);
    const auto wanted = usual->named_parameters();
    for (const auto& item : by_name) {
      EXPECT_TRUE(at::equal(item.value(), wanted[item.key()])) << item.key();
      EXPECT_EQ(item.value().strides(), wanted[item.key()].strides()) << item.key();
    }
    const auto buffers = net->named_buffers(), wanted_buffers = usual->named_buffers();
    for (const auto& item : buffers) {
      EXPECT_TRUE(at::equal(item.value(), wanted_buffers[item.key()])) << item.key();
    }
    const at::Tensor drawn_next = torch::rand({3});
    torch::manual_seed(8);
    const EveryWay again;
    torch::rand({3});
    EXPECT_TRUE(at::equal(torch::rand({3}), drawn_next));
  });
}

Tower deferred_tower(uint64_t seed = 0, int count = 3) {
  const DeferredInit deferred;
  return Tower(seed, count);
}

// As for a model that is built in float64 within a program of float32.
TEST(DeferredInit, ADefaultDtypeThatIsPutBackBeforeTheValuesAreMade) {
  isolated([] {
    const auto usual = torch::get_default_dtype();
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    torch::manual_seed(8);
    const torch::nn::Linear wanted(60, 50);
    torch::manual_seed(8);
    const torch::nn::Linear net = [] {
      const DeferredInit deferred;
      return torch::nn::Linear(60, 50);
    }();
    torch::set_default_dtype(usual);
    materialize(net);
    EXPECT_TRUE(at::equal(net->weight, wanted->weight));
  });
}

TEST(DeferredInit, TrainsUnderFsdpAndDdpToTheSameBits) {
  for (const bool share : {true, false}) {
    spawn(2, [&](World& world) {
      const Tower net = deferred_tower(), usual = deferred_tower(), eager;
      EXPECT_TRUE(is_deferred(net->blocks[1]->up->weight));
      Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net), .share_memory = share});
      Ddp ddp(usual, world.group());
      const auto wanted = eager->named_parameters();
      for (const auto& item : usual->named_parameters()) {
        EXPECT_TRUE(at::equal(item.value(), wanted[item.key()])) << item.key();
      }
      FusedAdamW divided(fsdp.parameters(), torch::optim::AdamWOptions(0.01));
      FusedAdamW whole(usual->parameters(), torch::optim::AdamWOptions(0.01));
      for (int step = 0; step < 2; ++step) {
        fsdp.zero_grad();
        ddp.zero_grad();
        tower_loss(net, world.rank(), step).backward();
        tower_loss(usual, world.rank(), step).backward();
        divided.step();
        whole.step();
      }
      expect_same_parameters(fsdp, net, usual);
    });
  }
}

TEST(DeferredInit, AModelIsNeverWholeInMemory) {
  spawn(2, [](World& world) {
    constexpr int64_t kOfThem = 20, kOneLayer = 4 * (200 * 200 + 200);  // bytes
    CountedMemory memory;
    const auto net = [] {
      const DeferredInit deferred;
      torch::nn::Sequential layers;
      for (int64_t i = 0; i < kOfThem; ++i) layers->push_back(torch::nn::Linear(200, 200));
      return layers;
    }();
    EXPECT_LT(memory.peak(), 3 * kOneLayer);
    memory.forget_peak();
    Fsdp fsdp(net, world.group(),
              {.units = units_of<torch::nn::LinearImpl>(*net), .share_memory = false});
    // The shards, what was small enough to be made at once, and what one unit takes on the way.
    EXPECT_LT(memory.peak(), (kOfThem / 2 + 6) * kOneLayer);
    EXPECT_LT(memory.now(), (kOfThem / 2 + 4) * kOneLayer);
  });
}

}  // namespace
}  // namespace lockstep::test
