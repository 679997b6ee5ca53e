// Converting a module that exists: what is replaced, what stays, what is refused.
#include "lockstep/parallel/sync_batch_norm.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::nn::BatchNorm2d;
using torch::nn::BatchNormOptions;

// Children registered by name only, in every container, one of them frozen, one in eval().
struct Zoo : torch::nn::Module {
  Zoo() {
    torch::nn::Sequential sequence;
    sequence->push_back(torch::nn::Conv2d(2, 4, 1));
    sequence->push_back("norm", BatchNorm2d(BatchNormOptions(4).momentum(std::nullopt)));
    register_module("sequence", sequence);
    torch::nn::ModuleList list;
    list->push_back(torch::nn::BatchNorm1d(BatchNormOptions(5).affine(false)));
    list->push_back(torch::nn::BatchNorm3d(BatchNormOptions(6).track_running_stats(false)));
    register_module("list", list);
    torch::nn::ModuleDict dict;
    dict->update({{"first", BatchNorm2d(7).ptr()}});
    register_module("dict", dict);
    register_module("plain", BatchNorm2d(8).ptr());
    named_children()["plain"]->eval();
    named_children()["plain"]->named_parameters()["bias"].requires_grad_(false);
  }
};

TEST(ConvertSyncBatchNorm, B64_EveryContainerHoldsTheSameTensorsUnderTheSameNames) {
  spawn(2, [](World& world) {
    Zoo zoo;
    const auto parameters = zoo.named_parameters();
    const auto buffers = zoo.named_buffers();
    EXPECT_EQ(convert_sync_batch_norm(zoo, world.group()), 5U);
    ASSERT_EQ(zoo.named_parameters().keys(), parameters.keys());
    ASSERT_EQ(zoo.named_buffers().keys(), buffers.keys());
    for (const auto& item : zoo.named_parameters()) {
      EXPECT_TRUE(item.value().is_same(parameters[item.key()])) << item.key();
    }
    for (const auto& item : zoo.named_buffers()) {
      EXPECT_TRUE(item.value().is_same(buffers[item.key()])) << item.key();
    }
    EXPECT_FALSE(zoo.named_children()["plain"]->is_training());
    auto* sequence = zoo.named_children()["sequence"]->as<torch::nn::SequentialImpl>();
    EXPECT_TRUE(sequence->ptr(1)->is_training());
    EXPECT_FALSE(zoo.named_parameters()["plain.bias"].requires_grad());
    EXPECT_FALSE(sequence->at<parallel::SyncBatchNorm2dImpl>(1).options.momentum().has_value());
  });
}

TEST(ConvertSyncBatchNorm, TakesHoldersAndSharedPointers) {
  spawn(2, [](World& world) {
    const auto zoo = std::make_shared<Zoo>();
    EXPECT_EQ(convert_sync_batch_norm(zoo, world), 5U);
    torch::nn::Sequential layers{BatchNorm2d(4)}, empty{nullptr};
    EXPECT_EQ(convert_sync_batch_norm(layers, world), 1U);
    EXPECT_NE(layers->ptr(0)->as<parallel::SyncBatchNorm2dImpl>(), nullptr);
    EXPECT_THROW(convert_sync_batch_norm(empty, world), ConfigError);
    EXPECT_THROW(convert_sync_batch_norm(std::shared_ptr<Zoo>(), world), ConfigError);
  });
}

TEST(ConvertSyncBatchNorm, B64_ContainersCallTheNewLayers) {
  spawn(2, [](World& world) {
    Zoo zoo;
    convert_sync_batch_norm(zoo, world.group());
    auto* sequence = zoo.named_children()["sequence"]->as<torch::nn::SequentialImpl>();
    auto* list = zoo.named_children()["list"]->as<torch::nn::ModuleListImpl>();
    auto* dict = zoo.named_children()["dict"]->as<torch::nn::ModuleDictImpl>();
    EXPECT_NE(list->ptr(0)->as<parallel::SyncBatchNorm1dImpl>(), nullptr);
    EXPECT_NE((*dict)["first"]->as<parallel::SyncBatchNorm2dImpl>(), nullptr);
    // Ranks' batches are all 0 and all 1, which statistics of one rank would both turn into 0.
    const auto y = sequence->at<parallel::SyncBatchNorm2dImpl>(1).forward(
        at::full({2, 4, 3, 3}, 1.0 * world.rank()));
    EXPECT_NEAR(y.mean().item<double>(), world.rank() == 0 ? -1 : 1, 1e-4);
    sequence->forward(at::randn({2, 2, 3, 3}));
    EXPECT_EQ(zoo.named_buffers()["sequence.norm.num_batches_tracked"].item<int64_t>(), 2);
  });
}

// The member is the layer that has the group.
struct WithMember : torch::nn::Module {
  WithMember() { norm = register_module("norm", SyncBatchNorm2d(BatchNormOptions(4))); }
  SyncBatchNorm2d norm{nullptr};
};

TEST(ConvertSyncBatchNorm, B64_ASyncBatchNormMemberIsGivenTheGroup) {
  spawn(2, [](World& world) {
    WithMember net;
    EXPECT_EQ(net.norm->group().size(), 1);
    EXPECT_EQ(convert_sync_batch_norm(net, world.group()), 1U);
    EXPECT_EQ(net.norm->group().size(), 2);
    EXPECT_EQ(convert_sync_batch_norm(*net.norm, world.group()), 1U);
  });
}

template <typename Module, typename Matcher>
void expect_refused(Module& module, Matcher message) {
  try {
    convert_sync_batch_norm(module, Group());
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), message);
  }
}

struct WithTorchMember : Zoo {
  WithTorchMember() {
    torch::nn::Sequential block;
    norm = BatchNorm2d(4);
    block->push_back(norm);
    register_module("block", block);
  }
  BatchNorm2d norm{nullptr};
};

// What a ResNet looks like whose header knows nothing of Lockstep.
struct Fixed : torch::nn::Module {
  explicit Fixed(const BatchNormOptions& options) : norm(options) { register_module("norm", norm); }
  at::Tensor forward(const at::Tensor& x) { return norm(x); }
  BatchNorm2d norm;
};

struct Synchronous : torch::nn::Module {
  explicit Synchronous(const BatchNormOptions& options) : norm(options) {
    register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& x) { return norm(x); }
  SyncBatchNorm2d norm;
};

TEST(ConvertSyncBatchNorm, B64_ATorchLayerThatAMemberHoldsIsSynchronisedWhereItIs) {
  for (const auto& options : {BatchNormOptions(4), BatchNormOptions(4).affine(false),
                              BatchNormOptions(4).momentum(std::nullopt),
                              BatchNormOptions(4).track_running_stats(false)}) {
    spawn(3, [&](World& world) {
      Fixed net(options), untouched(options);
      Synchronous want(options);
      EXPECT_EQ(convert_sync_batch_norm(net, world.group()), 1U);
      convert_sync_batch_norm(want, world.group());
      EXPECT_NE(net.named_children()["norm"]->as<torch::nn::BatchNorm2dImpl>(), nullptr);
      const auto run = [&](auto& module, const at::Tensor& x) {
        const at::Tensor leaf = x.clone().requires_grad_();
        const at::Tensor y = module.forward(leaf);
        y.pow(3).sum().backward();
        std::vector<at::Tensor> all{y.detach(), leaf.grad()};
        for (const auto& each : module.parameters()) all.push_back(each.grad().clone());
        for (const auto& each : module.buffers()) all.push_back(each.clone());
        return all;
      };
      auto generator = at::detail::createCPUGenerator(world.rank());
      // One rank has no sample in the second step.
      for (const int64_t rows : {3, world.rank() == 1 ? 0 : 2}) {
        const at::Tensor x = at::randn({rows, 4, 2, 2}, generator);
        expect_equal(run(net, x), run(want, x));
      }
      const at::Tensor x = at::randn({5, 4, 2, 2}, generator);
      EXPECT_FALSE(at::equal(run(untouched, x)[0], run(net, x)[0])) << "this rank's statistics";
      run(want, x);
      for (auto* module :
           {static_cast<torch::nn::Module*>(&net), static_cast<torch::nn::Module*>(&want)})
        module->eval();
      expect_equal(run(net, x), run(want, x));
      // Without gradients, and in inference mode, statistics of all ranks as well.
      net.train();
      want.train();
      {
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(at::equal(net.forward(x), want.forward(x)));
      }
      const c10::InferenceMode inference;
      EXPECT_TRUE(at::equal(net.forward(x), want.forward(x)));
    });
  }
}

TEST(ConvertSyncBatchNorm, B64_ALayerThatNothingTellsFromOthersIsRefusedAndNothingChanged) {
  isolated([] {
    WithTorchMember net;
    Fixed bare(BatchNormOptions(4).affine(false).track_running_stats(false));
    net.register_module("bare", std::make_shared<Fixed>(bare));
    expect_refused(net, AllOf(HasSubstr("'bare.norm' has neither weights nor running statistics"),
                              HasSubstr("Declare it as lockstep::SyncBatchNorm1d, 2d or 3d")));
    EXPECT_NE(net.named_children()["plain"]->as<torch::nn::BatchNorm2dImpl>(), nullptr);
  });
}

struct Derived : torch::nn::BatchNorm2dImpl {
  using BatchNorm2dImpl::BatchNorm2dImpl;
};

TEST(ConvertSyncBatchNorm, B64_ADerivedClassAndARootLayerStayWhatTheyAre) {
  spawn(2, [](World& world) {
    Mlp net;
    const auto odd = net.register_module("odd", std::make_shared<Derived>(4));
    BatchNorm2d root(4);
    EXPECT_EQ(convert_sync_batch_norm(net, world.group()), 1U);
    EXPECT_EQ(convert_sync_batch_norm(*root, world.group()), 1U);
    const at::Tensor x = at::full({2, 4, 3, 3}, 1.0 * world.rank());
    for (auto* layer : {static_cast<torch::nn::BatchNorm2dImpl*>(odd.get()), root.get()}) {
      EXPECT_NEAR(layer->forward(x).mean().item<double>(), world.rank() == 0 ? -1 : 1, 1e-4);
    }
  });
}

// One layer, and one container, under two names.
TEST(ConvertSyncBatchNorm, B64_SharedLayersStayShared) {
  isolated([] {
    torch::nn::Module net;
    {
      torch::nn::Sequential inner;
      inner->push_back(BatchNorm2d(4));
      net.register_module("left", inner);
      net.register_module("right", inner);
      const auto again = inner->ptr(0);
      net.register_module("again", again);
    }
    EXPECT_EQ(convert_sync_batch_norm(net, Group()), 1U);
    const auto children = net.named_children();
    EXPECT_EQ(children["left"]->as<torch::nn::SequentialImpl>()->ptr(0), children["again"]);
    EXPECT_NE(children["again"]->as<parallel::SyncBatchNorm2dImpl>(), nullptr);
  });
}

TEST(ConvertSyncBatchNorm, B64_AModelWithoutAnyStaysAsItIs) {
  isolated([] {
    Mlp net;
    EXPECT_EQ(convert_sync_batch_norm(net, Group()), 0U);
  });
}

}  // namespace
}  // namespace lockstep::test
