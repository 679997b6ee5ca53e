// Mixed precision.
#include "lockstep/parallel/autocast.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/grad_scaler.h"
#include "on_gpu/checks.h"

namespace lockstep::on_gpu {
namespace {

// Products are those of converted operands, weights and losses stay float32, and training
// continues.
void autocast(const World& world) {
  auto net = small_net(world, at::kFloat);
  Ddp ddp(net, world.group());
  torch::optim::SGD sgd(net->parameters(), 0.05);
  std::vector<double> losses;
  for (int step = 0; step < 20; ++step) {
    ddp.zero_grad();
    const at::Tensor batch = batch_of(world, world.rank(), 0).to(at::kFloat);
    at::Tensor loss;
    {
      const Autocast autocast(world.device(), at::kBFloat16);
      const at::Tensor product = at::linear(batch, net->parameters()[0]);
      expect("a product under Autocast is not bfloat16", product.scalar_type() == at::kBFloat16);
      const at::Tensor by_hand =
          at::linear(batch.to(at::kBFloat16), net->parameters()[0].to(at::kBFloat16));
      expect_equal("a product under Autocast", product, by_hand);
      const at::Tensor out = net->forward(batch);
      loss = at::mse_loss(out, at::ones_like(out));
      expect("a loss under Autocast is not float32", loss.scalar_type() == at::kFloat);
    }
    loss.backward();
    for (const auto& parameter : net->parameters())
      expect("a gradient is not float32", parameter.grad().scalar_type() == at::kFloat);
    sgd.step();
    losses.push_back(loss.item<double>());
  }
  expect("the loss went from " + std::to_string(losses.front()) + " to " +
             std::to_string(losses.back()),
         losses.back() < 0.5 * losses.front());
}

// Factors are powers of two, so that a training with a scaler has the bits of one without, but for
// the step that it leaves out.
void grad_scaler(const World& world) {
  constexpr int kOverflow = 3;
  const auto trained = [&](bool scaled) {
    auto net = small_net(world, at::kFloat);
    Ddp ddp(net, world.group());
    torch::optim::SGD sgd(net->parameters(), 0.05);
    GradScaler scaler(world.group(), {.init_scale = 1024, .growth_interval = 1000});
    for (int step = 0; step < kSteps; ++step) {
      const bool overflows = step == kOverflow;
      if (overflows && !scaled) continue;
      ddp.zero_grad();
      at::Tensor loss =
          net->forward(batch_of(world, world.rank(), step).to(at::kFloat)).square().mean();
      // On one rank alone: no rank may step.
      if (overflows && world.rank() == world.size() - 1) loss = loss * 1e38;
      if (!scaled) {
        loss.backward();
        sgd.step();
        continue;
      }
      scaler.scale(loss).backward();
      expect("the scaler's step", scaler.step(sgd) != overflows);
      scaler.update();
      expect("the scaler's factor", scaler.factor() == (step < kOverflow ? 1024 : 512));
    }
    return flat(net->parameters());
  };
  expect_equal("parameters with a GradScaler", trained(true), trained(false));
}

// float16 products, whose small gradients need the scaler.
void half(const World& world) {
  auto net = small_net(world, at::kFloat);
  Ddp ddp(net, world.group());
  torch::optim::SGD sgd(net->parameters(), 0.05);
  GradScaler scaler(world.group());
  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    ddp.zero_grad();
    at::Tensor loss;
    {
      const Autocast autocast(world.device(), at::kHalf);
      const at::Tensor out = net->forward(batch_of(world, world.rank(), 0).to(at::kFloat));
      loss = at::mse_loss(out, at::ones_like(out));
    }
    scaler.scale(loss).backward();
    scaler.step(sgd);
    scaler.update();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  expect("the loss went from " + std::to_string(first) + " to " + std::to_string(last),
         last < 0.5 * first);
}

}  // namespace

std::vector<Check> precision_checks() {
  return {{"autocast", autocast}, {"grad_scaler", grad_scaler}, {"half", half}};
}

}  // namespace lockstep::on_gpu
