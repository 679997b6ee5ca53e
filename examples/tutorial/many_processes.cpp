// The tutorial's program for any number of processes (docs/tutorial.md).
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cmath>
#include <iostream>

#include "spiral.h"

int main() {
  auto world = lockstep::World::from_env();
  lockstep::seed_everything(1, world);
  auto points = Spiral(4096).map(torch::data::transforms::Stack<>());
  auto loader = torch::data::make_data_loader(std::move(points),
                                              lockstep::TorchSampler(4096, world, {.seed = 1}),
                                              torch::data::DataLoaderOptions().batch_size(64));

  torch::nn::Sequential net(torch::nn::Linear(2, 64), torch::nn::ReLU(), torch::nn::Linear(64, 64),
                            torch::nn::ReLU(), torch::nn::Linear(64, 3));
  lockstep::Ddp ddp(net, world);
  torch::optim::Adam adam(net->parameters(), 1e-2);

  for (int epoch = 0; epoch < 5; ++epoch) {
    double loss_sum = 0;
    int64_t right = 0, seen = 0;
    for (auto& batch : *loader) {
      adam.zero_grad();
      auto scores = net->forward(batch.data);
      auto loss = torch::nn::functional::cross_entropy(scores, batch.target);
      loss.backward();
      adam.step();
      loss_sum += loss.item<double>() * batch.data.size(0);
      right += scores.argmax(1).eq(batch.target).sum().item<int64_t>();
      seen += batch.data.size(0);
    }
    loss_sum = lockstep::sum_over_ranks(loss_sum, world);
    right = lockstep::sum_over_ranks(right, world);
    seen = lockstep::sum_over_ranks(seen, world);
    world.main_out() << "epoch " << epoch << ": loss " << loss_sum / seen << ", right "
                     << 100 * right / seen << " %" << std::endl;
  }
  if (world.is_main()) torch::save(net, "spiral.pt");
}
