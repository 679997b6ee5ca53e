// Trains a 784-256-10 perceptron on Fashion-MNIST and tests it; on any number of ranks:
//   mnist
//   lockstep run --nproc-per-node 2 mnist --epochs 2
#include <lockstep/lockstep.h>
#include <lockstep/parallel/fused_adam.h>
#include <torch/torch.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "measure.h"
#include "program.h"
#include "progress.h"

namespace {

namespace nn = torch::nn;
using lockstep::World;
using lockstep::data::FashionMnist;
using lockstep::data::Split;

struct Options {
  std::string data = "/usr/share/datasets/fashion-mnist";
  int64_t epochs = 2;
  int64_t batch_size = 64;  // per rank
  double learning_rate = 1e-3;
  int64_t seed = 1;
  int64_t steps = 0;  // stop after this many; 0: all
  std::string json;
};

struct NetImpl : nn::Module {
  nn::Linear hidden{nullptr}, output{nullptr};

  NetImpl() {
    hidden = register_module("hidden", nn::Linear(784, 256));
    output = register_module("output", nn::Linear(256, 10));
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::relu(hidden(x))); }
};
TORCH_MODULE(Net);

struct Training {
  double startup_s, train_s, step_us, samples_per_s, final_loss;
  int64_t steps;
};

// The fused one is for CPUs; a GPU has kernels of its own.
std::unique_ptr<torch::optim::Optimizer> make_adam(Net& net, at::Device device, double rate) {
  if (device.is_cpu()) return std::make_unique<lockstep::FusedAdam>(net->parameters(), rate);
  return std::make_unique<torch::optim::Adam>(net->parameters(), rate);
}

Training train(const World& world, Net net, const Options& options) {
  const FashionMnist images(options.data, Split::Train);
  example::check_batch_size(options.batch_size, world.size(), images.size(), "images");
  const auto device = world.device();
  lockstep::Loader loader(
      images, world, {.batch_size = options.batch_size, .seed = options.seed, .device = device});
  lockstep::Ddp ddp(net, world);
  const auto adam = make_adam(net, device, options.learning_rate);

  const int64_t all_steps = options.epochs * loader.batches();
  const int64_t steps = options.steps > 0 ? std::min(options.steps, all_steps) : all_steps;
  if (world.is_main()) {
    std::printf("Fashion-MNIST, perceptron 784-256-10, on %s%s\n", world.describe().c_str(),
                world.group().deterministic() ? "" : ", sums in the transport's own order");
    std::printf(
        "batch %ld x %d rank%s = %ld images a step, %ld steps an epoch, Adam %g, seed %ld\n",
        options.batch_size, world.size(), world.size() == 1 ? "" : "s",
        options.batch_size * world.size(), loader.batches(), options.learning_rate, options.seed);
  }
  example::Progress progress(world, steps);
  std::array<torch::Tensor, 50> losses;  // the latest
  const auto mean_loss = [&](int64_t step) {
    const auto count = std::min<int64_t>(step, std::ssize(losses));
    return torch::stack(at::TensorList(losses.data(), count)).mean().item<double>();
  };

  Training result{.startup_s = example::seconds_since_job_start()};
  int64_t step = 0, samples = 0;
  example::Laps laps;
  for (int64_t epoch = 0; step < steps; ++epoch) {
    for (const auto& [x, y] : loader.epoch(epoch)) {
      ddp.zero_grad();
      const auto loss = nn::functional::cross_entropy(net->forward(x), y);
      loss.backward();
      adam->step();

      losses[step++ % std::ssize(losses)] = loss.detach();
      samples += y.size(0) * world.size();
      laps.lap();
      if (progress.due(step)) progress.print(step, mean_loss(step), samples / laps.total_s());
      if (step == steps) break;
    }
  }
  result.train_s = laps.total_s();
  result.step_us = laps.median_us();
  result.samples_per_s = samples / result.train_s;
  result.final_loss = mean_loss(step);
  result.steps = step;
  return result;
}

struct Test {
  int64_t correct, counted;
};

// Every rank takes its share of the test images, each image once.
Test test(const World& world, Net net, const Options& options) {
  const FashionMnist images(options.data, Split::Test);
  const auto device = world.device();
  lockstep::Loader loader(images, world,
                          {.batch_size = 1000, .shuffle = false, .exact = true, .device = device});
  const torch::NoGradGuard no_grad;
  torch::Tensor sums =
      torch::zeros({2}, torch::TensorOptions(device).dtype(torch::kLong));  // correct, counted
  for (const auto& [x, y] : loader.epoch(0)) {
    sums[0] += net->forward(x).argmax(1).eq(y).sum();
    sums[1] += y.size(0);
  }
  world.group().all_reduce(sums).wait();
  return {sums[0].item<int64_t>(), sums[1].item<int64_t>()};
}

void report(const World& world, const Options& options, const Training& training,
            const Test& tested) {
  std::vector<double> memory;
  for (const auto& text : world.group().gather_bytes(std::to_string(example::peak_rss_mb()))) {
    memory.push_back(std::stod(text));
  }
  if (!world.is_main()) return;
  const double accuracy = static_cast<double>(tested.correct) / static_cast<double>(tested.counted);
  std::printf(
      "trained %ld steps in %.2f s: %.0f samples/s, %.0f us a step (median), first step %.2f s "
      "after the start\n",
      training.steps, training.train_s, training.samples_per_s, training.step_us,
      training.startup_s);
  std::printf("test accuracy %.2f %% (%ld of %ld images), final loss %.4f, peak memory per rank",
              100 * accuracy, tested.correct, tested.counted, training.final_loss);
  for (const double mb : memory) std::printf(" %.0f", mb);
  std::printf(" MB\n");
  if (options.json.empty()) return;
  const nlohmann::json line = {{"workload", "mnist"},
                               {"world", world.size()},
                               {"steps", training.steps},
                               {"samples_per_s", training.samples_per_s},
                               {"step_us", training.step_us},
                               {"train_s", training.train_s},
                               {"startup_s", training.startup_s},
                               {"accuracy", accuracy},
                               {"counted", tested.counted},
                               {"final_loss", training.final_loss},
                               {"peak_rss_mb", memory}};
  std::ofstream file(options.json);
  file << line.dump() << "\n";
  if (!file.flush())
    throw lockstep::Error("cannot write " + options.json + ": check folder, rights and space");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a perceptron on Fashion-MNIST");
  Options options;
  app.add_option("--data", options.data, "folder of the four IDX files")
      ->envname("FASHION_MNIST")
      ->capture_default_str();
  app.add_option("--epochs", options.epochs)->check(example::positive())->capture_default_str();
  example::add_training_options(app, options);
  app.add_option("--seed", options.seed)->check(example::not_negative())->capture_default_str();
  app.add_option("--steps", options.steps, "stop after this many; 0: all")
      ->check(example::not_negative());
  app.add_option("--json", options.json, "write the figures to this file, as one line");

  return example::run(app, argc, argv, [&] {
    const World world = World::from_env();
    torch::manual_seed(options.seed);
    Net net;
    net->to(world.device());
    const Training training = train(world, net, options);
    const Test tested = test(world, net, options);
    report(world, options, training, tested);
  });
}
