// The tutorial's program for one process (docs/tutorial.md): libtorch alone.
#include <torch/torch.h>

#include <cmath>
#include <iostream>

#include "spiral.h"

int main() {
  torch::manual_seed(1);
  auto points = Spiral(4096).map(torch::data::transforms::Stack<>());
  auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
      std::move(points), torch::data::DataLoaderOptions().batch_size(64));

  torch::nn::Sequential net(torch::nn::Linear(2, 64), torch::nn::ReLU(), torch::nn::Linear(64, 64),
                            torch::nn::ReLU(), torch::nn::Linear(64, 3));
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
    std::cout << "epoch " << epoch << ": loss " << loss_sum / seen << ", right "
              << 100 * right / seen << " %" << std::endl;
  }
  torch::save(net, "spiral.pt");
}
