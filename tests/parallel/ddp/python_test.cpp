// The same model, seed and data in C++ and in Python's DistributedDataParallel.
#include "parallel/python.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/parallel/autocast.h"
#include "lockstep/parallel/averager.h"
#include "lockstep/parallel/check_same.h"
#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/global_mean.h"
#include "lockstep/parallel/grad_scaler.h"
#include "lockstep/parallel/lr_scheduler.h"
#include "lockstep/parallel/metrics.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "lockstep/parallel/update_batch_norm.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

constexpr int kSteps = 100;

uint64_t fnv1a(const std::vector<at::Tensor>& parameters) {
  uint64_t value = 0xcbf29ce484222325;
  for (const auto& parameter : parameters) {
    const auto* bytes = static_cast<const uint8_t*>(parameter.const_data_ptr());
    for (size_t i = 0; i < parameter.nbytes(); ++i) value = (value ^ bytes[i]) * 0x100000001b3;
  }
  return value;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                        std::vector<at::Tensor> parameters) {
  using namespace torch::optim;
  if (name == "sgd") return std::make_unique<SGD>(parameters, SGDOptions(0.1).momentum(0.9));
  if (name == "adam") return std::make_unique<FusedAdam>(parameters, AdamOptions(1e-2));
  return std::make_unique<FusedAdamW>(parameters, AdamWOptions(1e-2).weight_decay(0.1));
}

class Python : public ::testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(On, Python,
                         ::testing::Values(Ranks{"auto", 1}, Ranks{"shm", 2}, Ranks{"gloo", 2},
                                           Ranks{"shm", 4}, Ranks{"gloo", 4}),
                         name_of);

// What python_peer.py prints about one case.
void expect_same_training(World& world, const std::string& name, std::istream& lines) {
  const auto dash = name.find('-');
  const std::string mode = name.substr(dash + 1);
  uint64_t initial = 0, last = 0;
  lines >> initial;
  Mlp net;
  ASSERT_EQ(fnv1a(net.parameters()), initial);
  Ddp ddp(net, world.group());
  const auto optimizer = make_optimizer(name.substr(0, dash), net.parameters());
  for (int step = 0; step < kSteps; ++step) {
    std::vector<double> theirs(world.size());
    for (double& loss : theirs) lines >> loss;
    ddp.zero_grad();
    if (mode == "accumulate") {
      const auto hold = ddp.hold();
      square_loss(net, world.rank(), kSteps + step).backward();
    }
    const auto loss = square_loss(net, world.rank(), step);
    loss.backward();
    if (mode == "clip") clip_grad_norm_(net.parameters(), 0.05);
    optimizer->step();
    EXPECT_NEAR(loss.item<double>(), theirs[world.rank()], 1e-6) << "step " << step;
  }
  lines >> last;
  ASSERT_TRUE(lines);
  if (world.size() <= 2) {
    EXPECT_EQ(fnv1a(net.parameters()), last);
  }
}

// On one thread the forward, backward and update kernels are the same code, and halving a sum of
// two is exact in either order, so that one and two ranks are the same bits. Four are not: Python's
// Gloo adds around a ring. Losses then agree to 1e-6.
TEST_P(Python, B16_TrainsAsPythonsDdpDoes) {
  const std::vector<std::string> cases{"sgd-plain",   "sgd-accumulate",   "sgd-clip",  "adam-plain",
                                       "adamw-plain", "adamw-accumulate", "adamw-clip"};
  const std::string peer =
      output_of(fmt::format("{} {}/tests/parallel/ddp/python_peer.py {} {}", LOCKSTEP_PEERS_PYTHON,
                            LOCKSTEP_SOURCE_DIR, GetParam().count, fmt::join(cases, " ")));
  spawn(GetParam(), [&](World& world) {
    at::set_num_threads(1);
    std::istringstream lines(peer);
    for (const auto& name : cases) {
      SCOPED_TRACE(name);
      expect_same_training(world, name, lines);
    }
  });
}

[[noreturn]] void become_python_rank(const char* what) {
  // Python opens the port itself.
  if (const char* socket = std::getenv("LOCKSTEP_STORE_FD")) close(std::atoi(socket));
  const char* script = LOCKSTEP_SOURCE_DIR "/tests/parallel/ddp/python_peer.py";
  execl(LOCKSTEP_PEERS_PYTHON, LOCKSTEP_PEERS_PYTHON, script, "mixed", what, nullptr);
  throw std::runtime_error("cannot start " LOCKSTEP_PEERS_PYTHON ": run `make bench-setup`");
}

// A rank of each kind; `body` is C++'s.
void beside_python(int python, const char* what, const std::function<void(World&)>& body) {
  spawn_bare(2,
             [&](int rank) {
               if (rank == python) become_python_rank(what);
               at::set_num_threads(1);
               World world = World::from_env({.python_peers = true});
               body(world);
             },
             {.backend = "gloo"});
}

// By one all_reduce, as python_peer.py does.
void average_by_hand(const Mlp& net, const Group& group) {
  std::vector<at::Tensor> parts;
  for (const auto& gradient : gradients(net)) parts.push_back(gradient.flatten());
  const at::Tensor flat = at::cat(parts);
  group.all_reduce(flat, ReduceOp::Average).wait();
  int64_t offset = 0;
  for (const auto& gradient : gradients(net)) {
    gradient.copy_(flat.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
    offset += gradient.numel();
  }
}

void expect_same_on_ranks(const Mlp& net, const Group& group) {
  std::vector<at::Tensor> parts;
  for (const auto& parameter : net.parameters()) parts.push_back(parameter.flatten());
  const at::Tensor own = at::cat(parts).detach();
  std::vector<at::Tensor> all{at::empty_like(own), at::empty_like(own)};
  group.all_gather(all, own).wait();
  EXPECT_TRUE(at::equal(all[0], all[1]));
}

// Ranks of both kinds train one model; each averages gradients by hand.
TEST(MixedGroup, RanksOfCppAndOfPythonTrainOneModel) {
  for (const int python : {0, 1}) {
    beside_python(python, "adamw-plain", [](World& world) {
      Mlp net;
      const auto adamw = make_optimizer("adamw", net.parameters());
      for (int step = 0; step < kSteps; ++step) {
        adamw->zero_grad();
        square_loss(net, world.rank(), step).backward();
        average_by_hand(net, world.group());
        adamw->step();
      }
      expect_same_on_ranks(net, world.group());
    });
  }
}

// What computes on its own rank, and what makes the one collective that its header names.
TEST(MixedGroup, WithLoaderAutocastClippingSchedulerAndGlobalMean) {
  beside_python(1, "adamw-all", [](World& world) {
    Mlp net;
    const auto adamw = make_optimizer("adamw", net.parameters());
    LrScheduler scheduler(*adamw, step_lr({.size = 5, .gamma = 0.5}));
    auto generator = at::detail::createCPUGenerator(7);
    const at::Tensor samples = at::randn({18, 6}, generator);
    Loader loader(data::TensorDataset(samples, samples), world,
                  {.batch_size = 4, .seed = 1, .prefetch = 2});
    for (int64_t epoch = 0; epoch < 8; ++epoch) {
      for (const auto& [x, y] : loader.epoch(epoch)) {
        at::Tensor loss;
        {
          const Autocast autocast(at::kCPU, at::kBFloat16);
          loss = net.forward(x).square().sum();
        }
        const double scale = parallel::global_mean_scale(world.group(), x.size(0));
        adamw->zero_grad();
        (loss * scale).backward();
        average_by_hand(net, world.group());
        clip_grad_norm_(net.parameters(), 0.05);
        adamw->step();
        scheduler.step();
      }
    }
    expect_same_on_ranks(net, world.group());
  });
}

// Python's rank exits once both have connected: no refusal may wait for it.
TEST(MixedGroup, WhatNeedsRanksOfLockstepIsRefused) {
  beside_python(1, "nothing", [](World& world) {
    const Group& group = world.group();
    // Before it, Python's rank may still be connecting, which fails when this one ends.
    at::Tensor one = torch::ones({1});
    group.all_reduce(one, ReduceOp::Sum).wait();
    Mlp net;
    torch::optim::SGD sgd(net.parameters(), 0.1);
    const std::vector<std::pair<const char*, std::function<void()>>> calls{
        {"Ddp", [&] { Ddp ddp(net, group); }},
        {"SyncBatchNorm",
         [&] {
           torch::nn::Sequential s(torch::nn::BatchNorm1d(8));
           (void)convert_sync_batch_norm(*s, group);
         }},
        {"SyncBatchNorm", [&] { SyncBatchNorm1d layer(torch::nn::BatchNormOptions(8), group); }},
        {"ZeroOptimizer",
         [&] {
           ZeroOptimizer zero(net.parameters(), group, [](auto groups) {
             return std::make_unique<torch::optim::SGD>(std::move(groups), 0.1);
           });
         }},
        {"Averager", [&] { Averager averager(net, {{.group = group, .period = 2}}); }},
        {"Fsdp", [&] { Fsdp fsdp(net, group); }},
        {"GradScaler over a group", [&] { GradScaler scaler(group); }},
        {"check_same()", [&] { check_same(net, group); }},
        {"check_same()", [&] { check_same(net, sgd, group); }},
        {"broadcast_optimizer()", [&] { broadcast_optimizer(sgd, group); }},
        {"Checkpointer", [&] { Checkpointer saver(group, "never_made", {.async = false}); }},
        {"Checkpointer", [&] { Checkpointer saver(group, "never_made"); }},
        {"update_batch_norm", [&] { update_batch_norm(net, group, [] {}); }},
        {"gather_for_metrics",
         [&] {
           (void)gather_for_metrics(torch::ones({2, 1}), group);
         }},
        {"split()", [&] { (void)group.split(0); }},
    };
    for (const auto& [who, call] : calls) {
      EXPECT_THAT(
          message_of<ConfigError>(call),
          testing::HasSubstr(fmt::format("[gloo] {} works among ranks that run Lockstep, and "
                                         "this group has Python ranks",
                                         who)));
    }
  });
}

}  // namespace
}  // namespace lockstep::test
