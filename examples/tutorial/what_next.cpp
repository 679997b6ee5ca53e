// The tutorial's last program (docs/tutorial.md): it resumes, accumulates, clips, and measures on
// samples of its own.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <exception>
#include <iostream>

#include "spiral.h"

void train(const lockstep::World& world) {
  lockstep::seed_everything(1, world);
  lockstep::Loader train(Spiral(4096), world, {.batch_size = 32, .seed = 1, .drop_last = true});
  lockstep::Loader test(Spiral(1000), world, {.batch_size = 100, .shuffle = false, .exact = true});

  torch::nn::Sequential net(torch::nn::Linear(2, 64), torch::nn::ReLU(), torch::nn::Linear(64, 64),
                            torch::nn::ReLU(), torch::nn::Linear(64, 3));
  lockstep::Ddp ddp(net, world);
  lockstep::FusedAdam adam(net->parameters(), 1e-2);

  lockstep::Checkpointer checkpoints(world, "checkpoints", {.retention = {.keep_last = 2}});
  checkpoints.track("net", net);
  checkpoints.track("adam", adam);
  checkpoints.track("loader", train);
  int64_t step = 0;
  if (auto found = checkpoints.restore_latest()) {
    step = found->step;
    world.main_out() << "resumes after step " << step << std::endl;
  }

  for (int64_t epoch = train.state().epoch; epoch < 5; ++epoch) {
    for (auto [x, y] : train.epoch(epoch)) {
      const bool is_last_of_two = ++step % 2 == 0;
      if (!is_last_of_two) ddp.zero_grad();
      const auto loss = torch::nn::functional::cross_entropy(net->forward(x), y) / 2;
      if (!is_last_of_two) {
        const auto hold = ddp.hold();  // this micro-batch is only added
        loss.backward();
        continue;
      }
      loss.backward();  // the gradients are the averages of both micro-batches over all ranks
      lockstep::clip_grad_norm_(net->parameters(), 1.0);
      adam.step();
    }
    checkpoints.save(step);

    const torch::NoGradGuard no_grad;
    double right = 0, seen = 0;
    for (auto [x, y] : test.epoch(0)) {
      right += net->forward(x).argmax(1).eq(y).sum().item<double>();
      seen += static_cast<double>(y.size(0));
    }
    right = lockstep::sum_over_ranks(right, world);
    seen = lockstep::sum_over_ranks(seen, world);
    world.main_out() << "epoch " << epoch << ": right " << 100 * right / seen << " % of " << seen
                     << std::endl;
  }
  checkpoints.finish();
}

int main() {
  try {
    train(lockstep::World::from_env());
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
