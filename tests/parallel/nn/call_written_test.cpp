// A forward() that writes to its arguments, as recurrent networks in C++ do: through call() it
// leaves what it leaves without.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/lockstep.h"
#include "parallel/fsdp/models.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using at::Tensor;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

constexpr int64_t kWide = 40;

torch::nn::Linear wide_linear() { return torch::nn::Linear(kWide, kWide); }

// The hidden state in and out, and nothing else.
struct CellImpl : torch::nn::Module {
  void forward(const Tensor& x, Tensor& h) { h = torch::tanh(in(x) + call(rec, h)); }
  torch::nn::Linear in = register_module("in", wide_linear()),
                    rec = register_module("rec", wide_linear());
};
TORCH_MODULE(Cell);

struct PairCellImpl : torch::nn::Module {
  Tensor forward(Tensor x, std::tuple<Tensor, Tensor>& state) {
    state = cell(x, state);
    return std::get<0>(state);
  }
  torch::nn::LSTMCell cell = register_module("cell", torch::nn::LSTMCell(kWide, kWide));
};
TORCH_MODULE(PairCell);

struct EncoderImpl : torch::nn::Module {
  Tensor forward(Tensor x, std::vector<Tensor>& skips, int& count) {
    for (auto& layer : {first, second}) {
      x = torch::tanh(torch::nn::Linear(layer)(x));
      skips.push_back(x);
      ++count;
    }
    return x;
  }
  torch::nn::Linear first = register_module("first", wide_linear()),
                    second = register_module("second", wide_linear());
};
TORCH_MODULE(Encoder);

struct DecoderImpl : torch::nn::Module {
  Tensor forward(Tensor x, std::vector<Tensor>& skips) {
    for (x = layer(x); !skips.empty(); skips.pop_back()) x = torch::tanh(x + skips.back());
    return x;
  }
  torch::nn::Linear layer = register_module("layer", wide_linear());
};
TORCH_MODULE(Decoder);

struct MemoryImpl : torch::nn::Module {
  Tensor forward(const Tensor& x, const Tensor& scale, std::optional<Tensor>& last) {
    const Tensor y = layer(last ? x + *last : x) * scale;
    last = y;
    return y;
  }
  torch::nn::Linear layer = register_module("layer", wide_linear());
};
TORCH_MODULE(Memory);

struct StatefulNetImpl : torch::nn::Module {
  StatefulNetImpl() {
    torch::manual_seed(4);
    cell = register_module("cell", Cell());
    pair = register_module("pair", PairCell());
    encoder = register_module("encoder", Encoder());
    decoder = register_module("decoder", Decoder());
    memory = register_module("memory", Memory());
  }
  // T x N x kWide.
  Tensor forward(const Tensor& xs) {
    const Tensor zeros = torch::zeros_like(xs[0]);
    Tensor h = zeros, y;
    auto state = std::make_tuple(zeros, zeros);
    std::optional<Tensor> last;
    const Tensor scale = torch::full({1}, 0.5);
    for (int64_t t = 0; t < xs.size(0); ++t) {
      call(cell, xs[t], h);
      y = call(pair, h + xs[t], state);
      y = call(memory, std::move(y), scale, last);
    }
    std::vector<Tensor> skips{y};
    count = 0;
    const Tensor code = call(encoder, xs[0], skips, count);
    depth = skips.size();
    return call(decoder, code, skips) + h + std::get<1>(state) + *last;
  }
  Modules modules() const {
    return {cell.ptr(), pair.ptr(), encoder.ptr(), decoder.ptr(), memory.ptr()};
  }
  Cell cell{nullptr};
  PairCell pair{nullptr};
  Encoder encoder{nullptr};
  Decoder decoder{nullptr};
  Memory memory{nullptr};
  int count = 0;
  size_t depth = 0;
};
TORCH_MODULE(StatefulNet);

Tensor steps_of(int rank, int step) {
  return at::randn({4, 3, kWide}, at::detail::createCPUGenerator(100 * step + rank));
}

Tensor loss_of(const StatefulNet& net, int rank, int step) {
  const Tensor loss = call(net, steps_of(rank, step)).square().mean();
  EXPECT_EQ(net->count, 2);
  EXPECT_EQ(net->depth, 3U);
  return loss;
}

TEST(CallWritten, UnderFsdpTheBitsAreThoseOfDdp) {
  const auto expect = [](FsdpOptions options, bool nested) {
    for (const int ranks : {1, 2}) {
      spawn(ranks, [&](World& world) {
        const StatefulNet net, usual;
        options.units = net->modules();
        if (nested) options.units.push_back(net->cell->rec.ptr());
        expect_as_ddp(world, net, usual, options, [&](const StatefulNet& model, int step) {
          return loss_of(model, world.rank(), step);
        });
      });
    }
  };
  expect({}, false);
  expect({.share_memory = false}, false);
  expect({.share_memory = false}, true);
  expect({.sharding = Sharding::Gradients, .share_memory = false}, true);
  expect({.reshard_ranks = 1, .share_memory = false}, true);
}

TEST(CallWritten, WithoutGradients) {
  on_both([](World& world, const FsdpOptions& options) {
    const StatefulNet net, usual;
    const Fsdp fsdp(net, world.group(), with_units(options, net->modules()));
    const at::NoGradGuard no_grad;
    for (int step = 0; step < 2; ++step) {
      EXPECT_TRUE(at::equal(loss_of(net, 0, step), loss_of(usual, 0, step)));
    }
  });
}

// Bits but for the order in which gradients of several uses are added up.
TEST(CallWritten, ActivationCheckpointingComputesThem) {
  for (const int ranks : {1, 2}) {
    spawn(ranks, [](World& world) {
      const StatefulNet net, usual;
      Modules modules = net->modules();
      modules.push_back(net->cell->rec.ptr());
      const ActivationCheckpointing recompute(modules);
      Ddp ddp(net, world), plain(usual, world);
      for (int step = 0; step < 2; ++step) {
        ddp.zero_grad();
        plain.zero_grad();
        const Tensor loss = loss_of(net, world.rank(), step);
        const Tensor other = loss_of(usual, world.rank(), step);
        EXPECT_TRUE(at::equal(loss, other));
        {
          const auto hold = ddp.hold();  // a layer that is recomputed several times needs it
          loss.backward();
        }
        (net->cell->in->bias.sum() * 0).backward();
        other.backward();
        const auto parameters = usual->named_parameters();
        for (const auto& item : net->named_parameters()) {
          const Tensor want = parameters[item.key()].grad();
          ASSERT_TRUE(item.value().grad().defined()) << item.key();
          EXPECT_TRUE(at::allclose(item.value().grad(), want, 1e-4, 1e-6)) << item.key();
        }
      }
    });
  }
}

// The graph that is kept runs the second time from the same arguments, a list of skips among them.
TEST(CallWritten, OfAGraphThatIsKept) {
  isolated([] {
    const StatefulNet net, usual;
    const ActivationCheckpointing recompute(net->modules());
    for (const auto& model : {net, usual}) {
      const Tensor loss = loss_of(model, 0, 0);
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
    }
    const auto parameters = usual->named_parameters();
    for (const auto& item : net->named_parameters()) {
      const Tensor want = parameters[item.key()].grad();
      EXPECT_TRUE(at::allclose(item.value().grad(), want, 1e-4, 1e-6)) << item.key();
    }
  });
}

TEST(CallWritten, ActivationCheckpointingUnderFsdp) {
  on_both([](World& world, const FsdpOptions& options) {
    const StatefulNet net, usual;
    Fsdp fsdp(net, world.group(), with_units(options, net->modules()));
    Ddp ddp(usual, world.group());
    const ActivationCheckpointing recompute(net->modules());
    for (int step = 0; step < 2; ++step) {
      fsdp.zero_grad();
      ddp.zero_grad();
      loss_of(net, world.rank(), step).backward();
      loss_of(usual, world.rank(), step).backward();
      expect_same_gradients(fsdp, usual, 1e-6);
    }
  });
}

// One tensor, not two with the same memory, of which a change in place would reach only one graph.
TEST(CallWritten, WhatIsReturnedToo) {
  struct Both : torch::nn::Module {
    Tensor forward(const Tensor& x, Tensor& h) { return h = layer(x); }
    torch::nn::Linear layer = register_module("layer", wide_linear());
  };
  isolated([] {
    const auto net = std::make_shared<Both>();
    std::vector<Tensor> gradients;
    std::optional<ActivationCheckpointing> recompute;
    for (const bool is_recomputed : {false, true}) {
      if (is_recomputed) recompute.emplace(Modules{net});
      net->zero_grad();
      Tensor h;  // which may be undefined
      Tensor y = call(net, steps_of(0, 0), h);
      EXPECT_TRUE(y.is_same(h));
      y.mul_(3);
      (h.square().sum() + y.sum()).backward();
      gradients.push_back(net->layer->weight.grad().clone());
    }
    EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
  });
}

// The other objects that the caller gives: its own tensors, and those that forward() leaves alone.
TEST(CallWritten, WhatIsNotWrittenStaysTheCallers) {
  struct Reads : torch::nn::Module {
    Tensor forward(Tensor x, std::vector<Tensor>& more, Tensor copied) {
      x = layer(x) + more[0] + copied;
      kept = x;
      copied = x;
      return x;
    }
    Tensor kept;
    torch::nn::Linear layer = register_module("layer", wide_linear());
  };
  spawn(1, [](World& world) {
    const auto net = std::make_shared<Reads>();
    const Fsdp fsdp(net, world.group(), {.param_dtype = at::kBFloat16});
    net->kept = torch::ones({kWide});
    std::vector<Tensor> more{torch::ones({kWide})};
    const Tensor& element = more[0];
    const Tensor before = element, x = torch::ones({kWide});
    const Tensor y = call(net, x, more, net->kept);
    EXPECT_TRUE(element.is_same(before));
    EXPECT_TRUE(net->kept.is_same(y));
    EXPECT_EQ(y.dtype(), at::kBFloat16);
  });
}

struct InPlaceImpl : torch::nn::Module {
  void forward(const Tensor& x, Tensor h) { h.add_(torch::tanh(layer(x))); }
  torch::nn::Linear layer = register_module("layer", wide_linear());
};
TORCH_MODULE(InPlace);

struct InPlaceNetImpl : torch::nn::Module {
  InPlaceNetImpl() {
    torch::manual_seed(5);
    for (int i = 0; i < 2; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), InPlace()));
    }
  }
  Tensor forward(const Tensor& x) {
    Tensor h = torch::zeros_like(x);
    for (auto& layer : layers) call(layer, x, h);
    return h;
  }
  std::vector<InPlace> layers;
};
TORCH_MODULE(InPlaceNet);

TEST(CallWritten, ChangesInPlaceReachTheCallersTensor) {
  on_both([](World& world, FsdpOptions options) {
    const InPlaceNet net, usual;
    options = with_units(options, {net->layers[0].ptr(), net->layers[1].ptr()});
    expect_as_ddp(world, net, usual, options, [&](const InPlaceNet& model, int step) {
      return call(model, steps_of(world.rank(), step)).square().mean();
    });
  });
}

TEST(CallWritten, ChangesInPlaceOfCopiesInAnotherDtype) {
  spawn(1, [](World& world) {
    const InPlaceNet net;
    Fsdp fsdp(
        net, world.group(),
        {.units = {net->layers[0].ptr(), net->layers[1].ptr()}, .param_dtype = at::kBFloat16});
    const auto run = [&] {
      Tensor h = torch::zeros({3, kWide});
      const Tensor before = h;
      call(net->layers[0], torch::ones({3, kWide}), h);
      EXPECT_TRUE(h.is_same(before));
      EXPECT_EQ(h.dtype(), at::kFloat);
      EXPECT_GT(h.abs().max().item<float>(), 0);
      return h;
    };
    const Tensor loss = call(net, torch::ones({3, kWide})).sum();
    loss.backward();
    for (const auto& shard : fsdp.shards())
      EXPECT_GT(shard.shard.grad().abs().sum().item<float>(), 0);
    const at::NoGradGuard no_grad;
    fsdp.unshard();
    run();
    fsdp.reshard();
  });
}

TEST(CallWritten, ChangesInPlaceAreRefusedWhereTheyWouldBeMadeTwice) {
  isolated([] {
    const InPlace net;
    const ActivationCheckpointing recompute({net.ptr()});
    Tensor h = torch::zeros({3, kWide});
    EXPECT_THAT(message_of<ConfigError>([&] {
                  call(net, torch::ones({3, kWide}), h);
                }),
                AllOf(HasSubstr("InPlaceImpl changed an argument of shape [3, 40] in place"),
                      HasSubstr("or leave the module out of ActivationCheckpointing")));
    const at::NoGradGuard no_grad;
    call(net, torch::ones({3, kWide}), h);
  });
}

struct Counter {
  int calls = 0;
};
struct CountsImpl : torch::nn::Module {
  Tensor forward(const Tensor& x, Counter& counter) {
    ++counter.calls;
    return layer(x);
  }
  torch::nn::Linear layer = register_module("layer", wide_linear());
};
struct PointsImpl : torch::nn::Module {
  Tensor forward(const Tensor& x, Tensor* h) {
    const Tensor y = layer(x);
    if (h != nullptr) *h = y;
    return y;
  }
  torch::nn::Linear layer = register_module("layer", wide_linear());
};
struct TwoImpl : torch::nn::Module {
  void forward(const Tensor& x, Tensor& h, Tensor& c) {
    h = layer(x);
    c = h * 2;
  }
  torch::nn::Linear layer = register_module("layer", wide_linear());
};

TEST(CallWritten, WhatCannotBeWrittenIsRefusedByName) {
  isolated([] {
    const auto counts = std::make_shared<CountsImpl>();
    const auto points = std::make_shared<PointsImpl>();
    const auto two = std::make_shared<TwoImpl>();
    const ActivationCheckpointing recompute({counts, points, two});
    const Tensor x = torch::ones({3, kWide});
    Counter counter;
    EXPECT_THAT(message_of<ConfigError>([&] { call(counts, x, counter); }),
                AllOf(HasSubstr("CountsImpl takes an object that it may write to"),
                      HasSubstr("Counter)"), HasSubstr("return")));
    Tensor h;
    EXPECT_THAT(message_of<ConfigError>([&] { call(points, x, &h); }),
                HasSubstr("PointsImpl takes an object that it may write to"));
    EXPECT_THAT(message_of<ConfigError>([&] { call(two, x, h, h); }),
                HasSubstr("TwoImpl wrote to an argument that it was given twice"));
    EXPECT_THAT(message_of<ConfigError>([&] { call(two, x, std::ref(h), std::ref(h)); }),
                HasSubstr("TwoImpl takes an object that it may write to"));
    call(points, x, nullptr).sum().backward();
    const at::NoGradGuard no_grad;
    call(counts, x, counter);
    EXPECT_EQ(counter.calls, 1);
  });
}

// C++ sets neither of two bases of this kind.
struct SharedTwice : torch::nn::Module, std::enable_shared_from_this<SharedTwice> {
  Tensor forward(const Tensor& x) { return layer(x); }
  torch::nn::Linear layer = register_module("layer", wide_linear());
};
struct SharedTwiceNet : torch::nn::Module, std::enable_shared_from_this<SharedTwiceNet> {
  SharedTwiceNet() {
    torch::manual_seed(6);
    first = register_module("first", std::make_shared<SharedTwice>());
    second = register_module("second", std::make_shared<SharedTwice>());
  }
  Tensor forward(const Tensor& x) { return call(second, torch::tanh(call(first, x))); }
  std::shared_ptr<SharedTwice> first, second;
};

TEST(Call, AModuleThatDerivesFromEnableSharedFromThis) {
  on_both([](World& world, const FsdpOptions& options) {
    const auto net = std::make_shared<SharedTwiceNet>();
    const auto usual = std::make_shared<SharedTwiceNet>();
    const ActivationCheckpointing recompute({net->first});
    expect_as_ddp(world, net, usual, with_units(options, {net->first, net->second}),
                  [&](const std::shared_ptr<SharedTwiceNet>& model, int step) {
                    return call(model, steps_of(world.rank(), step)).square().mean();
                  });
  });
}

}  // namespace
}  // namespace lockstep::test
