// What tests/device shows on a fake device, in short on real GPUs: lockstep run --nproc-per-node
// gpu on_gpu
#include <torch/torch.h>

#include <cstdio>
#include <functional>

#include "lockstep/comm/world.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/ddp.h"

namespace {

using lockstep::World;

// The same call on the CPU's tensors and the device's; whole numbers, so that no order of sums
// matters.
void compare(const World& world, const char* what,
             const std::function<void(const at::Tensor&, const at::Tensor&)>& call) {
  const int64_t count = 1000 * world.size();
  const at::Tensor here = at::arange(count).remainder(7).add(world.rank()).to(at::kFloat);
  const at::Tensor there = here.to(world.device()), out_here = at::zeros_like(here),
                   out_there = at::zeros_like(there);
  call(here, out_here);
  call(there, out_there);
  if (at::equal(there.cpu(), here) && at::equal(out_there.cpu(), out_here)) return;
  throw lockstep::Error(std::string(what) + " differs between CPU and device");
}

void compare_collectives(const World& world) {
  const auto& group = world.group();
  const int n = world.size();
  compare(world, "all_reduce", [&](auto& in, auto&) { group.all_reduce(in).wait(); });
  compare(world, "reduce", [&](auto& in, auto&) { group.reduce(in, n - 1).wait(); });
  compare(world, "broadcast", [&](auto& in, auto&) { group.broadcast(in, n - 1).wait(); });
  compare(world, "all_to_all", [&](auto& in, auto& out) { group.all_to_all(out, in).wait(); });
  compare(world, "all_gather", [&](auto& in, auto& out) {
    group.all_gather(out, in.narrow(0, 0, in.numel() / n)).wait();
  });
  compare(world, "reduce_scatter", [&](auto& in, auto& out) {
    group.reduce_scatter(out.narrow(0, 0, in.numel() / n), in).wait();
  });
  compare(world, "send and recv", [&](auto& in, auto& out) {
    auto sent = group.send(in, (world.rank() + 1) % n),
         received = group.recv(out, (world.rank() + n - 1) % n);
    sent.wait();
    received.wait();
  });
}

at::Tensor trained(const World& world, at::Device device) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 4));
  net->to(device, at::kDouble);
  lockstep::Ddp ddp(*net, world.group());
  torch::optim::SGD sgd(net->parameters(), 0.1);
  for (int step = 0; step < 10; ++step) {
    auto generator = at::detail::createCPUGenerator(100 * step + world.rank());
    const at::Tensor batch = at::randn({32, 16}, generator, at::kDouble).to(device);
    ddp.zero_grad();
    net->forward(batch).square().mean().backward();
    sgd.step();
  }
  return torch::nn::utils::parameters_to_vector(net->parameters()).detach().cpu();
}

}  // namespace

int main() {
  try {
    const World world = World::from_env();
    if (world.size() > 1) compare_collectives(world);
    // float64 products differ between CPU and GPU in their last bits only.
    const double difference =
        (trained(world, world.device()) - trained(world, at::kCPU)).abs().max().item<double>();
    if (!(difference < 1e-12))
      throw lockstep::Error("training differs by " + std::to_string(difference));
    world.group().barrier().wait();
    std::printf("rank %d on %s: good\n", world.rank(), world.device().str().c_str());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
