// Fits y = w x + b to 10,000 samples of y = 2 x + 3 + noise. The same program trains on one process
// and on many:
//   linear_regression
//   lockstep run --nproc-per-node 2 linear_regression
//   lockstep run --nproc-per-node 2 linear_regression --compare      # one process, then two
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>

#include "program.h"

namespace {

namespace nn = torch::nn;
using lockstep::World;

struct Options {
  int64_t epochs = 10;
  int64_t batch_size = 32;  // per rank
  double learning_rate = 0.01;
  std::string scaling = "none";
  int64_t seed = 1;
};

struct Result {
  double seconds;  // in the training loop
  double loss;     // over all samples
  double w, b;
};

// More ranks take fewer, better averaged steps; a larger rate can make up for it.
double scaled_rate(const Options& options, const lockstep::Group& group) {
  using lockstep::LrScaling;
  const auto scaling = options.scaling == "linear" ? LrScaling::Linear
                       : options.scaling == "sqrt" ? LrScaling::Sqrt
                                                   : LrScaling::None;
  return lockstep::scaled_lr(options.learning_rate, group, scaling);
}

Result train(const World& world, const lockstep::data::TensorDataset& samples,
             const Options& options) {
  lockstep::Loader loader(samples, world, {.batch_size = options.batch_size, .seed = options.seed});
  torch::manual_seed(options.seed);
  nn::Linear line(1, 1);
  lockstep::Ddp ddp(line, world);
  torch::optim::SGD sgd(line->parameters(), scaled_rate(options, world));

  const auto start = std::chrono::steady_clock::now();
  for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    for (const auto& [x, y] : loader.epoch(epoch)) {
      ddp.zero_grad();
      nn::functional::mse_loss(line->forward(x), y).backward();
      sgd.step();
    }
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;

  const torch::NoGradGuard no_grad;
  const auto loss = nn::functional::mse_loss(line->forward(samples.data()), samples.target());
  return {elapsed.count(), loss.item<double>(), line->weight.item<double>(),
          line->bias.item<double>()};
}

void print(const World& world, const Result& result) {
  std::printf("%s: %.3f s, loss %.4f, w = %.3f, b = %.3f\n", world.describe().c_str(),
              result.seconds, result.loss, result.w, result.b);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Linear regression: y = 2 x + 3 + noise");
  Options options;
  bool compare = false;
  app.add_option("--epochs", options.epochs)->check(example::not_negative())->capture_default_str();
  example::add_training_options(app, options);
  app.add_option("--lr-scaling", options.scaling, "of the learning rate with the number of ranks")
      ->check(CLI::IsMember({"none", "linear", "sqrt"}))
      ->capture_default_str();
  app.add_option("--seed", options.seed)->capture_default_str();
  app.add_flag("--compare", compare, "first train on one process, while the other ranks wait");

  return example::run(app, argc, argv, [&] {
    const World world = World::from_env();
    const lockstep::data::SyntheticRegression samples(10'000, {.seed = options.seed});
    example::check_batch_size(options.batch_size, world.size(), samples.size(), "samples");
    Result alone{};
    if (compare) {
      if (world.is_main()) {
        alone = train(World::solo(), samples, options);
        print(World::solo(), alone);
      }
      world.group().barrier().wait();
    }
    const Result together = train(world, samples, options);
    if (!world.is_main()) return;
    print(world, together);
    if (compare) {
      std::printf("speed-up on %d ranks: %.2fx\n", world.size(), alone.seconds / together.seconds);
    }
  });
}
