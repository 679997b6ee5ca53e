// Ddp on a device together with what else a program has.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "device/training.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/parallel/averager.h"
#include "lockstep/parallel/global_mean.h"
#include "lockstep/parallel/hooks.h"
#include "lockstep/parallel/join.h"
#include "lockstep/parallel/lr_scheduler.h"
#include "parallel/recomputed.h"

namespace lockstep::test {
namespace {

TEST(FeaturesOnDevice, SeveralBackwardsAStep) {
  expect_same_training(
      small_buckets, [](Mlp& net, Ddp& ddp, torch::optim::Optimizer& sgd, const at::Tensor& batch) {
        ddp.zero_grad();
        const at::Tensor out = net.forward(batch);
        out.square().mean().backward({}, /*retain_graph=*/true);
        out.abs().mean().backward();
        sgd.step();
      });
}

// Any change of the module before the Ddp, and any forward pass.
Training trained(const std::function<void(Mlp&)>& prepare,
                 const std::function<at::Tensor(Mlp&, const at::Tensor&)>& loss) {
  return [=](World& world, at::Device device) {
    Mlp net;
    prepare(net);
    net.to(device);
    Ddp ddp(net, world.group(), small_buckets());
    torch::optim::SGD sgd(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int i = 0; i < 8; ++i) {
      ddp.zero_grad();
      loss(net, input(world.rank(), i).to(device)).backward();
      sgd.step();
    }
    return parameters_on_cpu(net);
  };
}

TEST(FeaturesOnDevice, FrozenParameters) {
  expect_same_on_both(
      trained([](Mlp& net) { net.second->weight.set_requires_grad(false); },
              [](Mlp& net, const at::Tensor& x) { return net.forward(x).square().mean(); }));
}

TEST(FeaturesOnDevice, TiedParameters) {
  expect_same_on_both(trained([](Mlp& net) { net.register_module("twin", net.second.ptr()); },
                              [](Mlp& net, const at::Tensor& x) {
                                const auto once = torch::tanh(net.second(net.first(x)));
                                return net.third(net.second(once)).square().mean();
                              }));
}

TEST(FeaturesOnDevice, MixedDtypes) {
  expect_same_on_both(trained([](Mlp& net) { net.second->to(at::kDouble); },
                              [](Mlp& net, const at::Tensor& x) {
                                const auto wide =
                                    net.second(torch::tanh(net.first(x)).to(at::kDouble));
                                return net.third(wide.to(at::kFloat)).square().mean();
                              }));
}

TEST(FeaturesOnDevice, ActivationCheckpoints) {
  expect_same_on_both(trained([](Mlp&) {},
                              [](Mlp& net, const at::Tensor& x) {
                                const auto inner =
                                    torch::tanh(checkpointed(net.second, net.first(x)));
                                return net.third(inner).square().mean();
                              }));
}

TEST(FeaturesOnDevice, TwoModels) {
  expect_same_on_both([](World& world, at::Device device) {
    Mlp one, other(1);
    one.to(device);
    other.to(device);
    Ddp first(one, world.group(), small_buckets()), second(other, world.group(), small_buckets());
    torch::optim::SGD sgd(one.parameters(), 0.1), sgd_of_other(other.parameters(), 0.1);
    for (int i = 0; i < 8; ++i) {
      const at::Tensor x = input(world.rank(), i).to(device);
      first.zero_grad();
      second.zero_grad();
      (one.forward(x) - other.forward(x)).square().mean().backward();
      sgd.step();
      sgd_of_other.step();
    }
    auto all = parameters_on_cpu(one);
    for (auto& parameter : parameters_on_cpu(other)) all.push_back(parameter);
    return all;
  });
}

TEST(FeaturesOnDevice, RanksWithUnequalNumbersOfBatches) {
  expect_same_on_both([](World& world, at::Device device) {
    Mlp net;
    net.to(device);
    Ddp ddp(net, world.group(), small_buckets());
    torch::optim::SGD sgd(net.parameters(), 0.1);
    Join join({ddp});
    for (int i = 0; i < (world.rank() == 0 ? 6 : 3); ++i) {
      plain_step(net, ddp, sgd, input(world.rank(), i).to(device));
    }
    join.finish();
    return parameters_on_cpu(net);
  });
}

TEST(FeaturesOnDevice, ComparedParameters) {
  expect_same_training([] {
    auto options = small_buckets();
    options.check_same_every = 3;
    return options;
  });
  spawn_on_device(2, [](World& world) {
    Mlp net;
    net.to(world.device());
    Ddp ddp(net, world.group(), {.check_same_every = 1});
    {
      const at::NoGradGuard no_grad;
      if (world.rank() == 1) net.third->bias.add_(1);
    }
    const auto loss = net.forward(input(world.rank()).to(world.device())).square().mean();
    EXPECT_THAT(message_of([&] { loss.backward(); }), testing::HasSubstr("'third.bias'"));
  });
}

struct Halving : parallel::CommHook {
  std::string_view name() const override { return "halving"; }
  comm::Work start(const Group& group, const parallel::Bucket& bucket) override {
    bucket.flat.mul_(0.5);
    return group.all_reduce(bucket.flat, ReduceOp::Average);
  }
  int64_t bytes_sent() const override { return 0; }
};

TEST(FeaturesOnDevice, AHookOfOnesOwn) {
  expect_same_training([] {
    auto options = small_buckets();
    options.hook = std::make_shared<Halving>();
    return options;
  });
}

TEST(FeaturesOnDevice, LocalSgdAndAnAverager) {
  expect_same_on_both([](World& world, at::Device device) {
    Mlp net;
    net.to(device);
    auto options = small_buckets();
    options.hook = std::make_shared<LocalSgd>(LocalSgdOptions{.start_iteration = 2});
    Ddp ddp(net, world.group(), options);
    Averager averager(net, {{.group = world.group(), .period = 3}});
    torch::optim::SGD sgd(net.parameters(), 0.1);
    for (int i = 0; i < 9; ++i) {
      plain_step(net, ddp, sgd, input(world.rank(), i).to(device));
      averager.step();
    }
    return parameters_on_cpu(net);
  });
}

TEST(FeaturesOnDevice, LoaderGlobalMeanAndSchedulers) {
  expect_same_on_both([](World& world, at::Device device) {
    Mlp net;
    net.to(device);
    Ddp ddp(net, world.group(), small_buckets());
    torch::optim::SGD sgd(net.parameters(), 0.1);
    LrScheduler scheduler(sgd, step_lr({.size = 4, .gamma = 0.5}));
    ReduceLrOnPlateau plateau(sgd, world.group(), {.patience = 0});
    GlobalMean mean(world.group());
    const at::Tensor samples = at::cat({input(0, 0, 9), input(1, 0, 9)});
    Loader loader(data::TensorDataset(samples, samples), world,
                  {.batch_size = 4, .seed = 1, .prefetch = 2, .device = device});
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      at::Tensor loss;
      for (const auto& [x, y] : loader.epoch(epoch)) {
        ddp.zero_grad();
        loss = net.forward(x).square().sum();
        mean.add(x.size(0));
        loss.backward();
        mean.scale_gradients_(net.parameters());
        sgd.step();
        scheduler.step();
      }
      plateau.step(loss.item<double>());
    }
    return parameters_on_cpu(net);
  });
}

}  // namespace
}  // namespace lockstep::test
