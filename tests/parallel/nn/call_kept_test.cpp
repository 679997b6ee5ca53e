// Arguments of a recomputed forward() that the caller changes, or that end, before backward.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/lockstep.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using at::Tensor;
using ::testing::AllOf;
using ::testing::HasSubstr;
namespace rnn = torch::nn::utils::rnn;

struct Condition {
  Tensor scale;
};
using Conditions = std::map<std::string, Tensor>;

struct Scaled : torch::nn::Module {
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(6, 6));
};
struct ByReference : Scaled {
  Tensor forward(const Tensor& x, const Condition& c) { return torch::tanh(layer(x) * c.scale); }
};
struct ByValue : Scaled {
  Tensor forward(Tensor x, Condition c) { return torch::tanh(layer(x) * c.scale); }
};
struct ByName : Scaled {
  Tensor forward(const Tensor& x, const Conditions& c) {
    return torch::tanh(layer(x) * c.at("scale"));
  }
};
struct ByList : Scaled {
  Tensor forward(const Tensor& x, at::TensorList c) { return torch::tanh(layer(x) * c[0] + c[1]); }
};
struct BySpan : Scaled {
  Tensor forward(const Tensor& x, std::span<const Condition> c) {
    return torch::tanh(layer(x) * c[0].scale);
  }
};
struct BySizes : Scaled {
  Tensor forward(const Tensor& x, std::optional<at::IntArrayRef> sizes, std::string_view mode) {
    const Tensor y = layer(x) * sizes->at(0);
    return mode == "tanh" ? torch::tanh(y) : y;
  }
};
struct Packed : torch::nn::Module {
  Tensor forward(const Tensor& x, const rnn::PackedSequence& sequence) {
    return x + std::get<0>(lstm->forward_with_packed_input(sequence)).data().mean(0);
  }
  torch::nn::LSTM lstm = register_module("lstm", torch::nn::LSTM(6, 6));
};
struct BySharing : Scaled {
  Tensor forward(const Tensor& x, std::shared_ptr<const Condition> c) {
    return torch::tanh(layer(x) * c->scale);
  }
};
struct WithModule : Scaled {
  Tensor forward(const Tensor& x, const Scaled& other, Scaled* third) {
    return torch::nn::Linear(third->layer)(torch::nn::Linear(other.layer)(layer(x)));
  }
};

Tensor scale_of(int i) { return torch::full({6}, 0.5 + i); }

// Gradients after three layers of a model, with and without recomputing.
template <class Layer, class Use>
void expect_as_without(const Use& use) {
  isolated([&] {
    std::vector<std::vector<Tensor>> gradients;
    for (const bool is_recomputed : {false, true}) {
      torch::manual_seed(4);
      std::vector<std::shared_ptr<Layer>> layers;
      std::optional<ActivationCheckpointing> recompute;
      for (int i = 0; i < 3; ++i) layers.push_back(std::make_shared<Layer>());
      if (is_recomputed)
        recompute.emplace(
            std::vector<std::shared_ptr<torch::nn::Module>>(layers.begin(), layers.end()));
      const Tensor x = torch::randn({2, 6}).requires_grad_(true);
      use(layers, x).sum().backward();
      auto& all = gradients.emplace_back();
      all.push_back(x.grad());
      for (const auto& layer : layers) {
        for (const Tensor& parameter : layer->parameters()) all.push_back(parameter.grad());
      }
    }
    for (size_t i = 0; i < gradients[0].size(); ++i) {
      EXPECT_TRUE(at::equal(gradients[0][i], gradients[1][i])) << i;
    }
  });
}

TEST(CallKept, AnObjectThatIsUsedForTheNextLayer) {
  const auto use = [](const auto& layers, Tensor x) {
    Condition c;
    for (int i = 0; i < 3; ++i) {
      c.scale = scale_of(i);
      x = call(layers[i], x, c);
    }
    return x;
  };
  expect_as_without<ByReference>(use);
  expect_as_without<ByValue>(use);
  expect_as_without<BySharing>([](const auto& layers, Tensor x) {
    for (int i = 0; i < 3; ++i) {
      auto c = std::make_shared<const Condition>(Condition{scale_of(i)});
      x = call(layers[i], x, c);
    }
    return x;
  });
  expect_as_without<ByName>([](const auto& layers, Tensor x) {
    Conditions c;
    for (int i = 0; i < 3; ++i) {
      c["scale"] = scale_of(i);
      x = call(layers[i], x, c);
    }
    return x;
  });
}

TEST(CallKept, APackedSequence) {
  expect_as_without<Packed>([](const auto& layers, Tensor x) {
    std::optional<rnn::PackedSequence> sequence;
    for (int i = 0; i < 3; ++i) {
      sequence = rnn::pack_padded_sequence(torch::full({4, 2, 6}, 0.5 + i), torch::tensor({4, 3}));
      x = call(layers[i], x, *sequence);
    }
    return x;
  });
}

// Tensors of a list are arguments as those of a vector are: they have gradients, too.
TEST(CallKept, ViewsOfWhatChanges) {
  expect_as_without<ByList>([](const auto& layers, const Tensor& x) {
    std::vector<Tensor> list(2);
    Tensor y = x;
    for (int i = 0; i < 3; ++i) {
      list = {scale_of(i), x.square()};
      y = call(layers[i], y, at::TensorList(list));
    }
    return y;
  });
  expect_as_without<BySpan>([](const auto& layers, Tensor x) {
    std::vector<Condition> list(1);
    for (int i = 0; i < 3; ++i) {
      list[0].scale = scale_of(i);
      x = call(layers[i], x, std::span<const Condition>(list));
    }
    return x;
  });
  expect_as_without<BySizes>([](const auto& layers, Tensor x) {
    std::vector<int64_t> sizes(1);
    std::string mode = "tanh";
    for (int i = 0; i < 3; ++i) {
      sizes[0] = i + 1;
      x = call(layers[i], x, at::IntArrayRef(sizes), std::string_view(mode));
      mode = "none";
    }
    return x;
  });
}

// The sizes belong to a tensor that has ended, and the module is one of libtorch's.
TEST(CallKept, SizesOfATensorThatEnds) {
  isolated([] {
    const torch::nn::ConvTranspose2d net(
        torch::nn::ConvTranspose2dOptions(2, 2, 3).stride(2).padding(1));
    const ActivationCheckpointing recompute({net.ptr()});
    const auto loss = [&] {
      std::vector<int64_t> sizes{8, 8};
      const Tensor y = call(net, torch::ones({1, 2, 4, 4}), at::IntArrayRef(sizes));
      sizes = {100, 100};
      return y.sum();
    };
    loss().backward();
    EXPECT_TRUE(net->weight.grad().defined());
  });
}

TEST(CallKept, ModulesAreNoObjectsOfTheCaller) {
  expect_as_without<WithModule>([](const auto& layers, const Tensor& x) {
    return call(layers[0], x, *layers[1], layers[2].get());
  });
}

struct Base {
  virtual ~Base() = default;
  virtual Tensor scale() const { return scale_of(0); }
};
struct TakesBase : Scaled {
  Tensor forward(const Tensor& x, const Base& c) { return layer(x) * c.scale(); }
};
struct TakesOwner : Scaled {
  Tensor forward(const Tensor& x, const std::unique_ptr<Condition>& c) {
    return layer(x) * c->scale;
  }
};
struct TakesPointer : Scaled {
  Tensor forward(const Tensor& x, const Condition* c) { return c ? layer(x) * c->scale : layer(x); }
};
struct TakesViews : Scaled {
  Tensor forward(const Tensor& x, const std::vector<at::IntArrayRef>& c) {
    return layer(x) * c.at(0).at(0);
  }
};
struct TakesShared : Scaled {
  Tensor forward(const Tensor& x, std::shared_ptr<Condition> c) { return layer(x) * c->scale; }
};

TEST(CallKept, WhatHasNoCopyIsRefusedByName) {
  isolated([] {
    const Tensor x = torch::ones({2, 6});
    const auto refused = [&](const auto& net, auto&& argument) {
      const ActivationCheckpointing recompute({net});
      return message_of<ConfigError>([&] { call(net, x, argument); });
    };
    const Base base;
    EXPECT_THAT(refused(std::make_shared<TakesBase>(), base),
                AllOf(HasSubstr("TakesBase takes"), HasSubstr("Base, which may have changed")));
    EXPECT_THAT(refused(std::make_shared<TakesOwner>(), std::make_unique<Condition>()),
                HasSubstr("which may have changed or be gone"));
    const Condition c{scale_of(0)};
    const auto points = std::make_shared<TakesPointer>();
    EXPECT_THAT(refused(points, &c), HasSubstr("which may have changed or be gone"));
    EXPECT_EQ(refused(points, nullptr), "nothing");
    EXPECT_THAT(refused(std::make_shared<TakesViews>(), std::vector{at::IntArrayRef({1})}),
                HasSubstr("which may have changed or be gone"));
    EXPECT_THAT(refused(std::make_shared<TakesShared>(), std::make_shared<Condition>(c)),
                HasSubstr("takes an object that it may write to"));
    EXPECT_TRUE(call(points, x, &c).defined());  // not recomputed any more
  });
}

// A derived object stays one where only Fsdp is attached.
TEST(CallKept, AnObjectOfADerivedClassIsNotCutOff) {
  struct Derived : Base {
    Tensor scale() const override { return scale_of(1); }
  };
  spawn(1, [](World& world) {
    const auto net = std::make_shared<TakesBase>();
    const Fsdp fsdp(net, world.group());
    const Derived derived;
    const Base& base = derived;
    const Tensor x = torch::ones({2, 6}), of_base = call(net, x, Base());
    EXPECT_TRUE(at::equal(call(net, x, base), 3 * of_base));
  });
}

// It is no argument for the second run, whose backward goes on into the graph of the caller.
TEST(CallKept, ATensorOfAnObjectThatHasAGraphOfItsOwn) {
  isolated([] {
    const auto first = std::make_shared<ByReference>(), second = std::make_shared<ByReference>();
    const ActivationCheckpointing recompute({first, second});
    const Condition c{torch::ones({6}).requires_grad_(true).square().exp()};
    const Tensor loss = call(second, call(first, torch::ones({2, 6}), c), c).sum();
    EXPECT_THAT(message_of<ConfigError>([&] { loss.backward(); }),
                AllOf(HasSubstr("forward() of"), HasSubstr("ByReference"),
                      HasSubstr("give it such tensors as arguments")));
  });
}

}  // namespace
}  // namespace lockstep::test
