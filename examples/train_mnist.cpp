// A perceptron on Fashion-MNIST by a Trainer; on any number of ranks:
//   lockstep run --nproc-per-node 2 train_mnist
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>

namespace nn = torch::nn;
namespace train = lockstep::train;
using lockstep::data::FashionMnist;
using lockstep::data::Split;

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : "/usr/share/datasets/fashion-mnist";
  if (folder.starts_with("-") || argc > 2) {
    (folder == "--help" ? std::cout : std::cerr) << "usage: train_mnist [FOLDER]\n";
    return folder == "--help" ? 0 : 2;
  }
  const auto world = lockstep::World::from_env();
  lockstep::seed_everything(1, world);
  const FashionMnist images(folder, Split::Train), test_images(folder, Split::Test);

  nn::Sequential net(nn::Linear(784, 256), nn::ReLU(), nn::Linear(256, 10));
  train::Trainer trainer(
      world, net, train::cross_entropy(), images,
      {.optimizer = train::adam({.lr = 1e-3}),
       .learning_rate = train::cosine_decay({.steps = 50}),
       .epochs = 2,
       .loader = {.batch_size = 64, .seed = 1},
       .evaluation = {.data = test_images, .metrics = {std::make_shared<train::Accuracy>()}},
       .callbacks = {std::make_shared<train::Progress>(std::cout)}});
  const auto outcome = trainer.run();
  world.main_out() << "test accuracy " << outcome.state.metrics.at("accuracy") << "\n";
  return outcome.exit_status();
}
