// What it costs to see a run: steps with the progress line, log, TensorBoard and the endpoint for
// Prometheus, and steps without, by turns in the same processes. Prints one JSON line.
//
//   lockstep run --nproc-per-node 2 bench_monitor
#include <lockstep/comm/world.h>
#include <lockstep/parallel/ddp.h>
#include <lockstep/train/monitor.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace nn = torch::nn;

namespace {

constexpr std::array kClocks = {CLOCK_MONOTONIC, CLOCK_THREAD_CPUTIME_ID, CLOCK_PROCESS_CPUTIME_ID};
constexpr std::array kNames = {"wall", "cpu_of_thread", "cpu_of_process"};
using Times = std::array<double, kClocks.size()>;

Times now() {
  Times all{};
  for (size_t i = 0; i < kClocks.size(); ++i) {
    timespec time{};
    clock_gettime(kClocks[i], &time);
    all[i] = static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
  }
  return all;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  int64_t width = 256, blocks = 60, steps = 200, every = 50;
  std::string folder = "/tmp/lockstep-bench-monitor";
  std::string open_metrics;
  CLI::App app("What it costs to see a run.");
  app.add_option("--width", width, "of the hidden layer");
  app.add_option("--blocks", blocks, "of each kind");
  app.add_option("--steps", steps, "of a block");
  app.add_option("--every", every, "steps between two reports");
  app.add_option("--folder", folder, "for the files");
  app.add_option("--open-metrics", open_metrics, "file for node_exporter; none");
  CLI11_PARSE(app, argc, argv);

  const auto world = lockstep::World::from_env();
  at::set_num_threads(1);
  torch::manual_seed(1);
  nn::Sequential net(nn::Linear(784, width), nn::ReLU(), nn::Linear(width, 10));
  const lockstep::Ddp ddp(net, world);
  torch::optim::SGD sgd(net->parameters(), 1e-3);
  const auto x = torch::randn({64, 784});
  const auto y = torch::randint(10, {64}, at::kLong);
  lockstep::RunMonitor monitor(world, {.directory = folder,
                                       .every_steps = every,
                                       .name = "net",
                                       .total_steps = blocks * steps,
                                       .shown = lockstep::train::Shown::Progress,
                                       .tensorboard = true,
                                       .open_metrics_file = open_metrics,
                                       .prometheus_address = "127.0.0.1:0"});
  const auto block = [&](bool is_seen) {
    world.group().barrier().wait();
    const Times begun = now();
    for (int64_t i = 0; i < steps; ++i) {
      sgd.zero_grad();
      const auto loss = nn::functional::cross_entropy(net->forward(x), y);
      loss.backward();
      sgd.step();
      const double value = loss.item<double>();
      if (is_seen) monitor.step({.loss = value, .samples = 64, .learning_rate = 1e-3});
    }
    Times took = now();
    for (size_t i = 0; i < took.size(); ++i) took[i] = (took[i] - begun[i]) / double(steps);
    return took;
  };
  block(true);
  block(false);
  std::array<std::vector<double>, kClocks.size()> seen, unseen, more;
  for (int64_t i = 0; i < blocks; ++i) {
    // The first of a pair alternates.
    const bool first = i % 2 == 0;
    const Times one = block(first), other = block(!first);
    for (size_t c = 0; c < kClocks.size(); ++c) {
      seen[c].push_back(first ? one[c] : other[c]);
      unseen[c].push_back(first ? other[c] : one[c]);
      more[c].push_back(seen[c].back() / unseen[c].back() - 1);
    }
  }
  monitor.finish();
  nlohmann::ordered_json line = {{"ranks", world.size()}, {"width", width}, {"every", every}};
  for (size_t c = 0; c < kClocks.size(); ++c) {
    line[kNames[c]] = {{"step_us_unseen", 1e6 * median(unseen[c])},
                       {"report_us", 1e6 * (median(seen[c]) - median(unseen[c])) * double(every)},
                       {"more_percent", 100 * median(more[c])}};
  }
  if (world.is_main()) {
    std::filesystem::remove_all(folder);
    std::cerr << line.dump() << std::endl;
  }
  return 0;
}
