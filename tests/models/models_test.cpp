#include "lockstep/models/models.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <sstream>

#include "lockstep/checkpoint/interchange.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using models::Activation;
using models::ConvNet;
using models::Linear;
using models::Mlp;
using models::ResNet18;
using testing::AllOf;
using testing::HasSubstr;

int64_t parameters_of(const torch::nn::Module& net) {
  int64_t count = 0;
  for (const auto& parameter : net.parameters()) count += parameter.numel();
  return count;
}

// Python's network of models_peer.py has the same names, and from the same seed the same bits.
template <typename Make>
void expect_as_python(const Folder& folder, const std::string& name, const Make& make) {
  torch::manual_seed(7);
  auto net = make();
  auto python = read_tensors(folder / (name + ".safetensors"));
  std::map<std::string, at::Tensor> ours;
  for (const auto& item : net->named_parameters()) ours[item.key()] = item.value();
  for (const auto& item : net->named_buffers()) ours[item.key()] = item.value();
  EXPECT_EQ(ours.size() + 2, python.size()) << name;
  for (const auto& [key, value] : ours) {
    ASSERT_TRUE(python.contains("net." + key)) << name << " " << key;
    EXPECT_TRUE(at::equal(value, python.at("net." + key))) << name << " " << key;
  }
  const at::Tensor input = torch::randn(python.at("input").sizes());
  EXPECT_TRUE(at::equal(input, python.at("input"))) << name << ": draws as many numbers";
  // A mean over height and width is a pooling there.
  EXPECT_TRUE(at::allclose(net->forward(input), python.at("output"), 1e-4, 1e-5)) << name;

  // And its file loads.
  auto other = make();
  load_module(other, folder / (name + ".safetensors"),
              {.prefix = "net.", .allow_unexpected = {"*"}});
  EXPECT_TRUE(at::equal(other->parameters().back(), net->parameters().back()));
}

TEST(Models, HaveTheNamesAndTheBitsOfPythons) {
  isolated([] {
    const Folder folder;
    ASSERT_EQ(std::system(fmt::format("{} {}/tests/models/models_peer.py {}", LOCKSTEP_PEERS_PYTHON,
                                      LOCKSTEP_SOURCE_DIR, folder.path())
                              .c_str()),
              0);
    expect_as_python(folder, "linear", [] { return Linear({.inputs = 12, .outputs = 3}); });
    expect_as_python(folder, "mlp", [] {
      return Mlp({.sizes = {12, 8, 6, 3}, .activation = Activation::Tanh});
    });
    expect_as_python(folder, "mlp_dropout", [] {
      return Mlp({.sizes = {12, 8, 3}, .activation = Activation::Gelu, .dropout = 0.5});
    });
    expect_as_python(folder, "convnet", [] {
      return ConvNet({.in_channels = 3, .channels = {8, 16}});
    });
    expect_as_python(folder, "resnet18", [] { return ResNet18(); });
  });
}

TEST(Models, ResNet18HasTheParametersOfThePaper) {
  isolated([] {
    EXPECT_EQ(parameters_of(*ResNet18()), 11'689'512);
    ResNet18 small({.classes = 10, .small_images = true, .zero_init_residual = true});
    EXPECT_EQ(parameters_of(*small), 11'173'962);
    EXPECT_EQ(small->forward(torch::randn({2, 3, 32, 32})).sizes(), (std::vector<int64_t>{2, 10}));
    EXPECT_EQ(small->named_parameters()["layer3.1.bn2.weight"].abs().max().item<float>(), 0);
  });
}

TEST(Models, EvalLeavesDropoutOut) {
  isolated([] {
    Mlp mlp({.sizes = {4, 64, 2}, .dropout = 0.5});
    ConvNet net({.dropout = 0.5});
    const auto rows = torch::randn({3, 4}), images = torch::randn({3, 1, 8, 8});
    EXPECT_FALSE(at::equal(mlp(rows), mlp(rows)));
    EXPECT_FALSE(at::equal(net(images), net(images)));
    mlp->eval();
    net->eval();
    EXPECT_TRUE(at::equal(mlp(rows), mlp(rows)));
    EXPECT_TRUE(at::equal(net(images), net(images)));
  });
}

TEST(Models, AreClonedAndPrinted) {
  isolated([] {
    const auto same = [](auto net, const at::Tensor& input) {
      auto copy = std::dynamic_pointer_cast<typename decltype(net)::Impl>(net->clone());
      net->eval();
      copy->eval();
      EXPECT_TRUE(at::equal(net->forward(input), copy->forward(input)));
    };
    same(Linear({.inputs = 4}), torch::randn({3, 4}));
    same(Mlp({.sizes = {4, 5, 2}, .dropout = 0.1}), torch::randn({3, 2, 2}));
    same(ConvNet(), torch::randn({3, 1, 8, 8}));
    same(ResNet18({.classes = 3, .small_images = true}), torch::randn({1, 3, 8, 8}));
    EXPECT_EQ(parameters_of(*ConvNet({.batch_norm = false})), 9 * 32 + 32 + 9 * 32 * 64 + 64 + 650);
    std::ostringstream text;
    text << Mlp({.sizes = {4, 5, 2}}) << Linear({.inputs = 4});
    EXPECT_THAT(text.str(), HasSubstr("lockstep::models::Mlp(4 -> 5 -> 2, relu, dropout=0)"));
    EXPECT_THAT(text.str(), HasSubstr("models::Linear(inputs=4, outputs=1, bias=true)"));
  });
}

TEST(Models, RefuseImpossibleOptionsAndInputs) {
  isolated([] {
    const auto message = [](const auto& make) { return message_of<ConfigError>(make); };
    EXPECT_THAT(message([] { Linear({.inputs = 0}); }), HasSubstr("[linear] inputs = 0"));
    EXPECT_THAT(message([] { Mlp({.sizes = {3}}); }), HasSubstr("[mlp] sizes = [3]"));
    EXPECT_THAT(message([] { Mlp({.sizes = {3, 0, 2}}); }), HasSubstr("[mlp] sizes[1] = 0"));
    EXPECT_THAT(message([] { Mlp({.sizes = {3, 2}, .dropout = 1}); }), HasSubstr("dropout = 1"));
    EXPECT_THAT(message([] { ConvNet({.channels = {}}); }), HasSubstr("channels has 0 entries"));
    EXPECT_THAT(message([] { ResNet18({.classes = -1}); }), HasSubstr("classes = -1"));
    EXPECT_THAT(message([] {
                  Mlp({.sizes = {4, 2}})(torch::randn({3, 5}));
                }),
                HasSubstr("[mlp] input [3, 5]: needs n x 4"));
    EXPECT_THAT(message([] {
                  ConvNet()(torch::randn({3, 784}));
                }),
                AllOf(HasSubstr("[convnet] input [3, 784]"), HasSubstr(".flatten = false")));
    EXPECT_THAT(message([] {
                  ConvNet()(torch::randn({3, 1, 3, 8}));
                }),
                HasSubstr("of at least 4 x 4"));
    EXPECT_EQ(models::activation_named("leaky_relu"), Activation::LeakyRelu);
    EXPECT_EQ(models::name_of(Activation::Silu), "silu");
    EXPECT_THAT(message([] { models::activation_named("rellu"); }),
                HasSubstr("did you mean 'relu'?"));
  });
}

// Both halves of a batch on two ranks give the gradients of the whole batch.
template <typename Make>
void expect_like_one_process(World& world, const Make& make, const at::Tensor& input) {
  const auto target = torch::arange(input.size(0)) % 3;
  auto whole = make();
  auto net = make();
  EXPECT_GT(convert_sync_batch_norm(net, world), 0u);
  Ddp ddp(net, world);
  const auto half = input.size(0) / 2;
  const auto loss = [](const at::Tensor& y, const at::Tensor& t) {
    return torch::nn::functional::cross_entropy(y, t);
  };
  loss(whole(input), target).backward();
  const auto own = at::indexing::Slice(world.rank() * half, (world.rank() + 1) * half);
  loss(net(input.index({own})), target.index({own})).backward();
  for (const auto& item : whole->named_parameters()) {
    const auto gradient = net->named_parameters()[item.key()].grad();
    EXPECT_TRUE(at::allclose(gradient, item.value().grad(), 1e-3, 1e-5)) << item.key();
  }
}

TEST(Models, TrainOnTwoRanksAsOnOne) {
  spawn(2, [](World& world) {
    torch::manual_seed(3);
    const auto images = torch::randn({8, 3, 8, 8});
    const auto seeded = [](const auto& make) {
      return [make] {
        torch::manual_seed(5);
        return make();
      };
    };
    expect_like_one_process(world, seeded([] {
                              return ConvNet({.in_channels = 3, .classes = 3, .channels = {4, 6}});
                            }),
                            images);
    expect_like_one_process(
        world, seeded([] { return ResNet18({.classes = 3, .small_images = true}); }), images);
  });
}

}  // namespace
}  // namespace lockstep::test
