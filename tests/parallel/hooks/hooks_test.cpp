// Communication hooks: what they compute, what they send, and that they learn.
#include "lockstep/parallel/hooks.h"

#include "lockstep/parallel/averager.h"
#include "lockstep/parallel/fused_adam.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using parallel::Bucket;

// What the default does, in a hook's words.
class AllReduceHook : public CommHook {
 public:
  std::string_view name() const override { return "mine"; }
  comm::Work start(const Group& group, const Bucket& bucket) override {
    bytes_ += static_cast<int64_t>(bucket.flat.nbytes());
    return group.all_reduce(bucket.flat, ReduceOp::Average);
  }
  int64_t bytes_sent() const override { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

// y = W x with a W of low rank, which every hook has to find.
struct Problem {
  static constexpr int64_t kIn = 32, kOut = 16;
  at::Tensor weight;
  Problem() {
    auto generator = at::detail::createCPUGenerator(7);
    weight = at::randn({kOut, 2}, generator).mm(at::randn({2, kIn}, generator)) / 4;
  }
  at::Tensor x(int rank, int step) const {
    return at::randn({16, kIn}, at::detail::createCPUGenerator(100 * step + rank));
  }
  at::Tensor loss(torch::nn::Linear& net, int rank, int step) const {
    const at::Tensor batch = x(rank, step);
    return (net->forward(batch) - batch.mm(weight.t())).square().mean();
  }
};

struct Learned {
  double first = 0, last = 0;
  int64_t bytes = 0;
};

Learned learn(World& world, const std::shared_ptr<CommHook>& hook, int steps, double lr = 0.5) {
  const Problem problem;
  torch::manual_seed(3);
  torch::nn::Linear net(Problem::kIn, Problem::kOut);
  Ddp ddp(*net, world.group(), {.hook = hook});
  torch::optim::SGD sgd(net->parameters(), lr);
  Learned learned;
  for (int step = 0; step < steps; ++step) {
    ddp.zero_grad();
    const at::Tensor loss = problem.loss(net, world.rank(), step);
    loss.backward();
    sgd.step();
    if (step == 0) learned.first = loss.item<double>();
    learned.last = loss.item<double>();
  }
  learned.bytes = hook ? hook->bytes_sent() : 0;
  return learned;
}

TEST(CommHook, B46_AHookThatAllReducesIsTheDefault) {
  spawn(3, [](World& world) {
    const auto hook = std::make_shared<AllReduceHook>();
    expect_averages(world, make_mlp, square_loss_of_mlp, {.bucket_bytes = {64}, .hook = hook});
    EXPECT_GT(hook->bytes_sent(), 0);
  });
}

TEST(CommHook, B46_ThenRunsOnceAfterTheCollectiveInTheOrderOfBuckets) {
  class Twice : public AllReduceHook {
   public:
    comm::Work start(const Group& group, const Bucket& bucket) override {
      return then(AllReduceHook::start(group, bucket), [this, group, bucket] {
        order.push_back(bucket.index);
        // A second collective: the average of averages is the average.
        return group.all_reduce(bucket.flat, ReduceOp::Average);
      });
    }
    std::vector<size_t> order;
  };
  spawn(2, [](World& world) {
    const auto hook = std::make_shared<Twice>();
    Mlp net;
    Ddp ddp(net, world.group(), {.bucket_bytes = {64}, .hook = hook});
    const auto want = average_gradients(world.size(), make_mlp, square_loss_of_mlp);
    ddp.zero_grad();
    square_loss(net, world.rank()).backward();
    expect_equal(gradients(net), want);
    ASSERT_GT(hook->order.size(), 2U);
    EXPECT_TRUE(std::is_sorted(hook->order.begin(), hook->order.end()));
    EXPECT_EQ(hook->order.size(), ddp.buckets().size());
  });
}

TEST(CommHook, B46_UnusedParametersKeepTheirGradientUnderAHook) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group(), {.hook = std::make_shared<AllReduceHook>()});
    ddp.zero_grad();
    torch::tanh(net.first(input(world.rank()))).square().mean().backward();
    EXPECT_TRUE(net.first->weight.grad().defined());
    EXPECT_FALSE(net.third->weight.grad().defined());
  });
}

TEST(CommHook, B47_AnotherDtypeBesideAHookIsRefused) {
  spawn(2, [](World& world) {
    Mlp net;
    EXPECT_THROW(Ddp(net, world.group(),
                     {.hook = std::make_shared<AllReduceHook>(), .reduce_dtype = at::kDouble}),
                 ConfigError);
    EXPECT_THROW(CastHook(at::kLong), ConfigError);
    EXPECT_THROW(PowerSgd({.rank = 0}), ConfigError);
    EXPECT_THROW(TopK({.fraction = 0}), ConfigError);
  });
}

TEST(CommHook, B49_SixteenBitsHalveTheBytes) {
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    spawn(2, [&](World& world) {
      const auto hook = std::make_shared<CastHook>(dtype);
      Mlp net, plain;
      Ddp ddp(net, world.group(), {.hook = hook});
      square_loss(net, world.rank()).backward();
      const auto want = average_gradients(world.size(), make_mlp, square_loss_of_mlp);
      const double tolerance = dtype == at::kHalf ? 2e-3 : 1.6e-2;
      for (size_t i = 0; i < want.size(); ++i) {
        EXPECT_TRUE(at::allclose(gradients(net)[i], want[i], tolerance, tolerance / 10)) << i;
      }
      int64_t bytes = 0;
      for (const auto& parameter : net.parameters())
        bytes += static_cast<int64_t>(parameter.nbytes());
      EXPECT_GE(hook->bytes_sent(), bytes / 2);
      EXPECT_LT(hook->bytes_sent(), bytes / 2 + 64 * 6);
    });
  }
}

// A gradient that a bfloat16 cannot hold reaches the parameter all the same, over several passes.
TEST(CommHook, B49_ErrorFeedbackLosesNothingInTheLongRun) {
  spawn(2, [](World& world) {
    const auto sum_of_averages = [&](bool feedback) {
      torch::nn::Linear net(1, 1);
      Ddp ddp(*net, world.group(),
              {.hook = std::make_shared<CastHook>(at::kBFloat16, parallel::CastOptions{feedback})});
      double sum = 0;
      for (int pass = 0; pass < 64; ++pass) {
        ddp.zero_grad();
        // The bias's gradient is 1.005 on every rank, which bfloat16 rounds to 1.0078.
        (net->forward(at::ones({1, 1})) * 1.005).sum().backward();
        sum += net->bias.grad().item<double>();
      }
      return sum;
    };
    EXPECT_NEAR(sum_of_averages(true), 64 * 1.005, 0.01);
    EXPECT_GT(std::abs(sum_of_averages(false) - 64 * 1.005), 0.1);
  });
}

TEST(CommHook, ReduceDtypeRoundsOnce) {
  spawn(4, [](World& world) {
    // In bfloat16 256 + 1 is 256: summed there, three ones would vanish.
    torch::nn::Linear net(1, 1);
    net->to(at::kBFloat16);
    Ddp ddp(*net, world.group(), {.reduce_dtype = at::kFloat});
    (net->forward(at::zeros({1, 1}, at::kBFloat16)) * (world.rank() == 0 ? 256 : 4.0 / 3))
        .sum()
        .backward();
    EXPECT_EQ(net->bias.grad().item<float>(),
              static_cast<float>(c10::BFloat16((256 + 3 * 1.3359375F) / 4)));
  });
}

TEST(CommHook, B50_PowerSgdLearnsAndSendsLess) {
  spawn(2, [](World& world) {
    const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 2, .start_iteration = 2});
    const Learned learned = learn(world, hook, 200);
    const Learned plain = learn(world, std::make_shared<AllReduceHook>(), 200);
    EXPECT_LT(learned.last, learned.first * 1e-3);
    EXPECT_LT(learned.bytes * 3, plain.bytes);
  });
}

// The paper's algorithm (Vogels et al. 2019, algorithm 1 with 2), over all ranks in one process.
TEST(CommHook, B50_PowerSgdSendsWhatItsPaperSays) {
  spawn(2, [](World& world) {
    const Problem problem;
    const auto make = [] {
      torch::manual_seed(3);
      return torch::nn::Linear(Problem::kIn, Problem::kOut);
    };
    auto net = make(), other = make();
    const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 2, .start_iteration = 1});
    Ddp ddp(*net, world.group(), {.hook = hook});
    std::vector<at::Tensor> errors(2, at::zeros({Problem::kOut, Problem::kIn}));
    at::Tensor q;
    for (int step = 0; step < 4; ++step) {
      ddp.zero_grad();
      problem.loss(net, world.rank(), step).backward();
      std::vector<at::Tensor> m;
      for (int rank = 0; rank < 2; ++rank) {
        other->zero_grad();
        problem.loss(other, rank, step).backward();
        m.push_back(other->weight.grad().clone());
      }
      if (step == 0) {
        EXPECT_TRUE(at::equal(net->weight.grad(), (m[0] + m[1]) / 2));
        continue;
      }
      for (int rank = 0; rank < 2; ++rank) m[rank] += errors[rank];
      if (step > 1) {
        const at::Tensor p = std::get<0>(at::linalg_qr((m[0].mm(q) + m[1].mm(q)) / 2));
        q = (m[0].t().mm(p) + m[1].t().mm(p)) / 2;
        EXPECT_TRUE(at::allclose(net->weight.grad(), p.mm(q.t()), 1e-4, 1e-6)) << step;
      }
      for (int rank = 0; rank < 2; ++rank) errors[rank] = m[rank] - net->weight.grad();
      q = hook->state().at("q/weight").clone();  // the first start is the hook's own choice
      EXPECT_TRUE(at::allclose(hook->state().at("error/weight"), errors[world.rank()], 1e-4, 1e-6));
      EXPECT_LE(at::linalg_matrix_rank(net->weight.grad(), 1e-4).item<int64_t>(), 2);
      EXPECT_GT(errors[world.rank()].norm().item<double>(), 1e-3);
    }
  });
}

TEST(CommHook, B50_PowerSgdResumesToTheSameBits) {
  spawn(2, [](World& world) {
    const Problem problem;
    const auto pass = [&](torch::nn::Linear& net, Ddp& ddp, int step) {
      ddp.zero_grad();
      problem.loss(net, world.rank(), step).backward();
    };
    torch::manual_seed(3);
    torch::nn::Linear net(Problem::kIn, Problem::kOut);
    const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 2, .start_iteration = 1});
    std::optional<Ddp> ddp(std::in_place, *net, world.group(), DdpOptions{.hook = hook});
    for (int step = 0; step < 3; ++step) pass(net, *ddp, step);
    std::map<std::string, at::Tensor> saved;
    for (const auto& [name, tensor] : hook->state()) saved[name] = tensor.clone();
    pass(net, *ddp, 3);
    const at::Tensor want = net->weight.grad().clone();
    ddp.reset();

    const auto resumed =
        std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 2, .start_iteration = 1});
    resumed->restore(saved);
    Ddp again(*net, world.group(), {.hook = resumed});
    pass(net, again, 3);
    EXPECT_TRUE(at::equal(net->weight.grad(), want));
    EXPECT_THROW(resumed->restore({{"nonsense", at::ones({1})}}), ConfigError);
    EXPECT_THROW(resumed->restore({}), ConfigError);
  });
}

TEST(CommHook, TopKLearnsAndSendsLess) {
  spawn(2, [](World& world) {
    const Learned learned =
        learn(world, std::make_shared<TopK>(TopKOptions{.fraction = 0.1}), 200, 0.1);
    const Learned plain = learn(world, std::make_shared<AllReduceHook>(), 200, 0.1);
    EXPECT_LT(learned.last, learned.first * 0.05);
    EXPECT_LT(learned.bytes * 4, plain.bytes);
  });
}

TEST(CommHook, TopKOfEverythingIsTheAverage) {
  spawn(2, [](World& world) {
    expect_averages(world, make_mlp, square_loss_of_mlp,
                    {.hook = std::make_shared<TopK>(TopKOptions{.fraction = 1})});
  });
}

TEST(CommHook, B51_LocalSgdIsSilentAfterItsStartAndTheAveragerBringsRanksTogether) {
  spawn(2, [](World& world) {
    const Problem problem;
    torch::manual_seed(3);
    torch::nn::Linear net(Problem::kIn, Problem::kOut);
    const auto hook = std::make_shared<LocalSgd>(LocalSgdOptions{.start_iteration = 3});
    Ddp ddp(*net, world.group(), {.hook = hook});
    torch::optim::SGD sgd(net->parameters(), 0.5);
    parallel::Averager averager(*net, {{world.group(), 4}}, /*warm_up=*/3);
    // Both ranks' models in one process.
    std::vector<torch::nn::Linear> models;
    for (int rank = 0; rank < 2; ++rank) {
      models.emplace_back(std::dynamic_pointer_cast<torch::nn::LinearImpl>(net->clone()));
    }
    const auto step_in_one_process = [&](int step) {
      const at::NoGradGuard no_grad;
      std::vector<std::vector<at::Tensor>> grads;
      for (int rank = 0; rank < 2; ++rank) {
        const at::AutoGradMode grad(true);
        models[rank]->zero_grad();
        problem.loss(models[rank], rank, step).backward();
        grads.push_back(gradients(*models[rank]));
      }
      for (size_t i = 0; i < grads[0].size(); ++i) {
        const at::Tensor mean = (grads[0][i] + grads[1][i]) / 2;
        for (int rank = 0; rank < 2; ++rank) {
          models[rank]->parameters()[i].sub_(0.5 * (step < 3 ? mean : grads[rank][i]));
        }
        if (step < 3 || (step - 2) % 4 != 0) continue;
        const at::Tensor average = (models[0]->parameters()[i] + models[1]->parameters()[i]) / 2;
        for (int rank = 0; rank < 2; ++rank) models[rank]->parameters()[i].copy_(average);
      }
    };
    const auto alike = [&] {
      at::Tensor least = net->weight.detach().clone(), most = least.clone();
      world.group().all_reduce(least, ReduceOp::Min).wait();
      world.group().all_reduce(most, ReduceOp::Max).wait();
      return at::equal(least, most);
    };
    std::string history;
    int64_t bytes_at_start = 0;
    for (int step = 0; step < 12; ++step) {
      ddp.zero_grad();
      problem.loss(net, world.rank(), step).backward();
      sgd.step();
      averager.step();
      if (step == 2) bytes_at_start = hook->bytes_sent();
      history += alike() ? '=' : '.';
      step_in_one_process(step);
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        EXPECT_TRUE(
            at::allclose(net->parameters()[i], models[world.rank()]->parameters()[i], 1e-5, 1e-6))
            << "step " << step << ", parameter " << i;
      }
    }
    EXPECT_EQ(history, "===...=...=.");
    EXPECT_EQ(hook->bytes_sent(), bytes_at_start);
  });
}

TEST(CommHook, B51_LocalSgdKeepsASubgroupTogether) {
  spawn(4, [](World& world) {
    const Group pair = world.group().split(world.rank() / 2);
    Mlp net;
    Ddp ddp(net, world.group(),
            {.hook = std::make_shared<LocalSgd>(
                 LocalSgdOptions{.start_iteration = 0, .subgroup = pair})});
    square_loss(net, world.rank()).backward();
    Mlp first, second;
    square_loss(first, world.rank() / 2 * 2).backward();
    square_loss(second, world.rank() / 2 * 2 + 1).backward();
    for (size_t i = 0; i < gradients(net).size(); ++i) {
      EXPECT_TRUE(at::equal(gradients(net)[i], (gradients(first)[i] + gradients(second)[i]) / 2));
    }
  });
}

TEST(Averager, B52_LevelsTakeTurns) {
  spawn(4, [](World& world) {
    const Group pair = world.group().split(world.rank() / 2);
    torch::nn::Linear net(1, 1);
    parallel::Averager averager(*net, {{pair, 1}, {world.group(), 2}});
    const at::NoGradGuard no_grad;
    net->weight.fill_(world.rank());
    EXPECT_TRUE(averager.step());
    EXPECT_EQ(net->weight.item<float>(), world.rank() < 2 ? 0.5F : 2.5F);
    EXPECT_TRUE(averager.step());
    EXPECT_EQ(net->weight.item<float>(), 1.5F);
    EXPECT_THROW(parallel::Averager(*net, {{pair, 2}, {world.group(), 3}}), ConfigError);
    EXPECT_THROW(parallel::Averager(*net, {}), ConfigError);
  });
}

// The optimizer runs as soon as a bucket is averaged, inside backward().
class OptimizerHook : public AllReduceHook {
 public:
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;
  explicit OptimizerHook(Make make) : make_(std::move(make)) {}
  comm::Work start(const Group& group, const Bucket& bucket) override {
    return then(AllReduceHook::start(group, bucket), [this, bucket] {
      for (size_t i = 0; i < bucket.parameters.size(); ++i) {
        auto& optimizer = optimizers_[bucket.names[i]];
        if (!optimizer) optimizer = make_({bucket.parameters[i]});
        optimizer->step();
      }
      return comm::Work();
    });
  }

 private:
  Make make_;
  std::map<std::string, std::unique_ptr<torch::optim::Optimizer>> optimizers_;
};

TEST(CommHook, B53_AnOptimizerInTheHookIsTheOptimizerAfterIt) {
  const std::map<std::string, OptimizerHook::Make> kinds{
      {"sgd",
       [](auto p) {
         return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.1).momentum(0.9));
       }},
      {"adam",
       [](auto p) {
         return std::make_unique<torch::optim::Adam>(p, torch::optim::AdamOptions(0.01));
       }},
      {"adamw",
       [](auto p) { return std::make_unique<FusedAdamW>(p, torch::optim::AdamWOptions(0.01)); }}};
  for (const auto& [name, make] : kinds) {
    SCOPED_TRACE(name);
    spawn(2, [&](World& world) {
      Mlp net, usual;
      const auto optimizer = make(usual.parameters());
      Ddp ddp(net, world.group(),
              {.bucket_bytes = {64}, .hook = std::make_shared<OptimizerHook>(make)});
      Ddp other(usual, world.group());
      for (int step = 0; step < 4; ++step) {
        ddp.zero_grad();
        square_loss(net, world.rank(), step).backward();
        other.zero_grad();
        square_loss(usual, world.rank(), step).backward();
        optimizer->step();
      }
      expect_equal(net.parameters(), usual.parameters());
    });
  }
}

}  // namespace
}  // namespace lockstep::test
