// What trains on several ranks against one process that has the whole batch.
#include <algorithm>
#include <cmath>

#include "lockstep/models/transformer.h"
#include "lockstep/parallel/call.h"
#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "on_gpu/checks.h"

namespace lockstep::on_gpu {
namespace {

using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

// In float64 another order of additions shows in the last bits only.
constexpr double kTolerance = 1e-11;

std::unique_ptr<torch::optim::Optimizer> sgd_of(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::SGD>(std::move(parameters), SGDOptions(0.1).momentum(0.9));
}

std::unique_ptr<torch::optim::Optimizer> adam_of(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::AdamW>(std::move(parameters), AdamWOptions(1e-2));
}

void ddp(const World& world) {
  for (const int64_t bucket : {int64_t{1} << 20, int64_t{2000}}) {
    auto net = small_net(world);
    Ddp ddp(net, world.group(), {.bucket_bytes = {bucket}});
    const auto optimizer = sgd_of(net->parameters());
    for (int step = 0; step < kSteps; ++step) {
      ddp.zero_grad();
      net->forward(batch_of(world, world.rank(), step)).square().mean().backward();
      optimizer->step();
    }
    expect_close("parameters under Ddp", flat(net->parameters()), trained_bare(world, sgd_of),
                 kTolerance);
  }
}

// The batch in two parts, of which the first is held back.
void accumulate(const World& world) {
  auto net = small_net(world);
  Ddp ddp(net, world.group());
  const auto optimizer = sgd_of(net->parameters());
  for (int step = 0; step < kSteps; ++step) {
    ddp.zero_grad();
    const auto parts = batch_of(world, world.rank(), step).chunk(2);
    {
      const auto hold = ddp.hold();
      (net->forward(parts[0]).square().mean() / 2).backward();
    }
    (net->forward(parts[1]).square().mean() / 2).backward();
    optimizer->step();
  }
  expect_close("parameters with accumulation", flat(net->parameters()), trained_bare(world, sgd_of),
               kTolerance);
}

void same_as_cpu(const World& world) {
  auto net = small_net(world);
  const auto here = flat(net->parameters());
  net->to(at::kCPU);
  const auto optimizer = sgd_of(net->parameters());
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    net->forward(whole_batch(world, step).cpu()).square().mean().backward();
    optimizer->step();
  }
  const at::Tensor on_cpu = flat(net->parameters());
  expect("training changed nothing", !at::equal(here, on_cpu));
  expect_close("parameters on the device and on the CPU", trained_bare(world, sgd_of), on_cpu,
               kTolerance);
}

void clipping(const World& world) {
  auto net = small_net(world), plain = small_net(world);
  net->forward(batch_of(world, 0, 0)).square().sum().backward();
  plain->forward(batch_of(world, 0, 0)).square().sum().backward();
  const double norm = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.5);
  const at::Tensor ours = clip_grad_norm_(net->parameters(), 0.5);
  expect("the norm is not on the device", ours.device() == world.device());
  expect("norms differ", std::abs(ours.item<double>() - norm) <= 1e-10 * norm);
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    expect_close("a clipped gradient", net->parameters()[i].grad(), plain->parameters()[i].grad(),
                 kTolerance);
  }
  check_finite(*net, world.group());
}

void zero_optimizer(const World& world) {
  auto net = small_net(world);
  Ddp ddp(net, world.group());
  ZeroOptimizer adam(net->parameters(), world.group(),
                     zero<torch::optim::AdamW>(AdamWOptions(1e-2)));
  for (int step = 0; step < kSteps; ++step) {
    ddp.zero_grad();
    net->forward(batch_of(world, world.rank(), step)).square().mean().backward();
    adam.step();
  }
  const int64_t all = flat(net->parameters()).numel();
  expect("a rank holds all of the state", world.size() == 1 || adam.own_elements() < all);
  // Adam divides by the root of an average: what is small in it grows.
  expect_close("parameters with ZeroOptimizer", flat(net->parameters()),
               trained_bare(world, adam_of), 1e-7);
}

// Normalises over the batches of all ranks, in forward and backward.
void sync_batch_norm(const World& world) {
  const auto make = [&] {
    torch::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3)),
                              torch::nn::BatchNorm2d(8), torch::nn::ReLU());
    net->to(world.device(), at::kDouble);
    return net;
  };
  const auto images = [&](int rank, int step) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + rank));
    return at::randn({4, 3, 8, 8}, generator, at::kDouble).to(world.device());
  };
  auto net = make(), bare = make();
  convert_sync_batch_norm(net, world.group());
  Ddp ddp(net, world.group());
  const auto ours = sgd_of(net->parameters()), other = sgd_of(bare->parameters());
  for (int step = 0; step < kSteps; ++step) {
    ddp.zero_grad();
    net->forward(images(world.rank(), step)).square().mean().backward();
    ours->step();
    std::vector<at::Tensor> all;
    for (int rank = 0; rank < world.size(); ++rank) all.push_back(images(rank, step));
    other->zero_grad();
    bare->forward(at::cat(all)).square().mean().backward();
    other->step();
  }
  expect_close("parameters with SyncBatchNorm", flat(net->parameters()), flat(bare->parameters()),
               1e-9);
  expect_close("running statistics", flat({net->buffers()[0], net->buffers()[1]}),
               flat({bare->buffers()[0], bare->buffers()[1]}), 1e-9);
}

at::Tensor trained_by_fsdp(const World& world, FsdpOptions options) {
  auto net = small_net(world);
  for (const size_t layer : {0, 2}) options.units.push_back(net->ptr(layer));
  Fsdp fsdp(net, world.group(), options);
  const auto optimizer = sgd_of(fsdp.parameters());
  for (int step = 0; step < kSteps; ++step) {
    fsdp.zero_grad();
    call(net, batch_of(world, world.rank(), step)).square().mean().backward();
    optimizer->step();
  }
  fsdp.unshard();
  return flat(net->parameters());
}

void fsdp(const World& world) {
  using parallel::Sharding;
  const at::Tensor bare = trained_bare(world, sgd_of);
  expect_close("parameters under Fsdp", trained_by_fsdp(world, {}), bare, kTolerance);
  expect_close("parameters under Fsdp, gradients divided",
               trained_by_fsdp(world, {.sharding = Sharding::Gradients}), bare, kTolerance);
  expect_close("parameters under Fsdp, prefetched",
               trained_by_fsdp(world, {.forward_prefetch = true}), bare, kTolerance);
}

void fsdp_offload(const World& world) {
  expect_close("parameters under Fsdp with shards in the host's memory",
               trained_by_fsdp(world, {.offload = Offload::Cpu}), trained_bare(world, sgd_of),
               kTolerance);
}

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct SeenImpl : torch::nn::Module {
  explicit SeenImpl(std::vector<WeakStorage>* all) : seen(all) {
    weight = register_parameter("weight", torch::ones({512, 512}));
  }
  at::Tensor forward(const at::Tensor& x) {
    // A parameter's memory keeps the unit's.
    const auto* unit = static_cast<at::Tensor*>(weight.storage().data_ptr().get_context());
    seen->push_back(WeakStorage(unit->storage().getWeakStorageImpl()));
    return x * weight;
  }
  std::vector<WeakStorage>* seen;
  at::Tensor weight;
};
TORCH_MODULE(Seen);

struct SeenUnitsImpl : torch::nn::Module {
  SeenUnitsImpl() {
    for (int i = 0; i < 24; ++i)
      units.push_back(register_module("unit" + std::to_string(i), Seen(&seen)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& unit : units) {
      x = call(unit, x);
      most = std::max(most, std::count_if(seen.begin(), seen.end(),
                                          [](const auto& each) { return !each.expired(); }));
    }
    return x;
  }
  std::vector<Seen> units;
  std::vector<WeakStorage> seen;
  std::ptrdiff_t most = 0;
};
TORCH_MODULE(SeenUnits);

// A host that is far ahead of the device gathers no more units than one that waits for it. The CPU
// is never behind.
void fsdp_memory(const World& world) {
  if (world.size() == 1 || world.device().is_cpu()) return;
  SeenUnits net;
  net->to(world.device());
  FsdpOptions options;
  options.share_memory = false;
  for (const auto& unit : net->units) options.units.push_back(unit.ptr());
  Fsdp fsdp(net, world.group(), options);
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::ones({512, 512}, on(world, at::kFloat));
  call(net, x);
  at::Tensor slow = at::eye(4096, x.options());
  for (int i = 0; i < 60; ++i) slow = at::mm(slow, slow);
  net->seen.clear();
  net->most = 0;
  expect_equal("what the units compute", call(net, x + slow.sum() * 0), at::ones({512, 512}));
  expect("units in memory at a time: " + std::to_string(net->most), net->most <= 3);
}

// Ours in one pass against libtorch's, in float32 and float64.
void fused_adam(const World& world) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    auto net = small_net(world, dtype), plain = small_net(world, dtype);
    FusedAdamW ours(net->parameters(), AdamWOptions(1e-2));
    const auto other = adam_of(plain->parameters());
    for (int step = 0; step < kSteps; ++step) {
      ours.zero_grad();
      other->zero_grad();
      net->forward(batch_of(world, 0, step).to(dtype)).square().mean().backward();
      plain->forward(batch_of(world, 0, step).to(dtype)).square().mean().backward();
      ours.step();
      other->step();
    }
    expect_close("parameters after FusedAdamW", flat(net->parameters()), flat(plain->parameters()),
                 dtype == at::kFloat ? 1e-3 : 1e-8);
  }
}

// The model in Qwen's layout, forward and backward, on the device and on the CPU.
void transformer(const World& world) {
  torch::manual_seed(1);
  models::Transformer net({.vocabulary = 101, .layers = 2, .hidden = 64, .heads = 4});
  const at::Tensor ids = at::arange(4 * 32).mul(7).remainder(101).view({4, 32});
  const auto gradients = [&](at::Device device) {
    net->to(device, at::kDouble);
    net->zero_grad();
    call(net, ids.to(device), ids.roll(-1, 1).to(device)).backward();
    std::vector<at::Tensor> all;
    for (const auto& parameter : net->parameters()) all.push_back(parameter.grad());
    return flat(all);
  };
  const at::Tensor here = gradients(at::kCPU);
  expect("no gradient", here.abs().max().item<double>() > 0);
  expect_close("a Transformer's gradients", gradients(world.device()), here, 1e-6);
}

}  // namespace

std::vector<Check> training_checks() {
  return {{"same_as_cpu", same_as_cpu},
          {"ddp", ddp},
          {"accumulate", accumulate},
          {"clipping", clipping},
          {"zero_optimizer", zero_optimizer},
          {"sync_batch_norm", sync_batch_norm},
          {"fsdp", fsdp},
          {"fsdp_offload", fsdp_offload},
          {"fsdp_memory", fsdp_memory},
          {"fused_adam", fused_adam},
          {"transformer", transformer}};
}

}  // namespace lockstep::on_gpu
