#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  auto world = lockstep::World::from_env();  // one rank when it has no launcher
  lockstep::data::FashionMnist train("/usr/share/datasets/fashion-mnist",
                                     lockstep::data::Split::Train);
  lockstep::seed_everything(1, world);  // weights and dropout repeat
  const auto device = world.device();   // this rank's GPU, or the CPU
  lockstep::Loader loader(train, world, {.batch_size = 64, .seed = 1, .device = device});

  torch::nn::Sequential net(torch::nn::Linear(784, 256), torch::nn::ReLU(),
                            torch::nn::Linear(256, 10));
  net->to(device);
  lockstep::Ddp ddp(net, world);  // attaches; does not wrap or rename
  torch::optim::Adam adam(net->parameters(), 1e-3);

  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    torch::Tensor loss;
    for (auto [x, y] : loader.epoch(epoch)) {
      ddp.zero_grad();
      loss = torch::nn::functional::cross_entropy(net->forward(x), y);
      loss.backward();  // gradients are averaged over the ranks when it returns
      adam.step();
    }
    if (world.is_main())
      std::cout << "epoch " << epoch << ": loss " << loss.item<float>() << std::endl;
  }
}
