// Times training steps of a model on made data, on any number of ranks, and says where the time
// goes. Prints one JSON line.
#include <fmt/format.h>
#include <lockstep/lockstep.h>
#include <lockstep/parallel/fused_adam.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "../examples/measure.h"
#include "gpt.h"

namespace {

using namespace lockstep;
using torch::Tensor;
using Clock = std::chrono::steady_clock;

struct Options {
  std::string model = "gpt", mode = "ddp", optimizer = "fused", dtype = "fp32", trace;
  int64_t steps = 30, warmup = 5, batch = 8, accumulate = 1, threads = 1;
  std::vector<int64_t> bucket_kib;
  uint64_t seed = 1;
};

struct Work {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<bench::Batch> batches;
  std::function<Tensor(const bench::Batch&)> loss;
};

// 784-256-10 on images that are already tensors: nothing but the step is measured.
Work perceptron(const Options& options, int rank) {
  torch::nn::Sequential net;
  net->push_back(torch::nn::Linear(784, 256));
  net->push_back(torch::nn::ReLU());
  net->push_back(torch::nn::Linear(256, 10));
  auto generator = at::detail::createCPUGenerator(1000 * options.seed + rank);
  Work work{.module = net.ptr(), .batches = {}, .loss = {}};
  for (int i = 0; i < 32; ++i) {
    const std::vector<int64_t> sizes{options.batch, 784}, count{options.batch};
    work.batches.push_back(
        {torch::rand(sizes, generator), torch::randint(10, count, generator, torch::kLong)});
  }
  work.loss = [net](const bench::Batch& batch) mutable {
    return at::cross_entropy_loss(net->forward(batch.x), batch.y);
  };
  return work;
}

Work transformer(const Options& options, int rank) {
  const bench::GptShape shape;
  bench::Gpt net(shape);
  Work work{.module = net.ptr(),
            .batches = bench::synthetic_tokens(shape, options.batch, 1000 * options.seed + rank),
            .loss = {}};
  work.loss = [net](const bench::Batch& batch) mutable {
    return at::cross_entropy_loss(net->forward(batch.x).flatten(0, 1), batch.y.flatten());
  };
  return work;
}

struct Stepper {
  std::unique_ptr<torch::optim::Optimizer> whole;
  std::unique_ptr<ZeroOptimizer> divided;
  void step() { divided ? divided->step() : static_cast<void>(whole->step()); }
};

Stepper optimizer_of(const Options& options, const torch::nn::Module& module, const Group& group) {
  const auto adamw = torch::optim::AdamWOptions(3e-4).weight_decay(0.01);
  Stepper stepper;
  if (options.optimizer == "zero") {
    stepper.divided =
        std::make_unique<ZeroOptimizer>(module.parameters(), group, zero<FusedAdamW>(adamw));
  } else if (options.optimizer == "fused") {
    stepper.whole = std::make_unique<FusedAdamW>(module.parameters(), adamw);
  } else {
    stepper.whole = std::make_unique<torch::optim::AdamW>(module.parameters(), adamw);
  }
  return stepper;
}

double us(Clock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); }

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + std::ssize(values) / 2, values.end());
  return values[values.size() / 2];
}

// Medians over the latest passes. The rank that comes last to a pass waits for nobody: what it
// spends is the cost of communication, and what the others spend beyond that is waiting.
nlohmann::json communication_of(const DdpLog& log, const World& world) {
  nlohmann::json own;
  for (const auto& pass : log.passes) {
    own.push_back({pass.backward().count(), pass.communication().count(), pass.overlap().count(),
                   pass.exposed().count()});
  }
  std::vector<nlohmann::json> ranks;
  for (const auto& text : world.group().all_gather_bytes(own.dump()))
    ranks.push_back(nlohmann::json::parse(text));
  const auto figure = [&](size_t which, auto combined) {
    std::vector<double> values;
    for (size_t pass = 0; pass < own.size(); ++pass) {
      std::vector<double> of_ranks;
      for (const auto& rank : ranks) of_ranks.push_back(rank[pass][which]);
      values.push_back(combined(of_ranks));
    }
    return median(values);
  };
  const auto least = [](const std::vector<double>& v) { return std::ranges::min(v); };
  const auto mean = [](const std::vector<double>& v) {
    return std::reduce(v.begin(), v.end()) / static_cast<double>(v.size());
  };
  const auto beyond = [&](const std::vector<double>& v) { return mean(v) - least(v); };
  return {{"backward_us", figure(0, mean)},
          {"communication_us", figure(1, least)},
          {"overlap_us", figure(2, mean)},
          {"reducing_us", figure(3, least)},
          {"waiting_us", figure(3, beyond)}};
}

void measure(const Options& options) {
  const World world = World::from_env();
  at::set_num_threads(static_cast<int>(options.threads));
  torch::manual_seed(options.seed);
  const Work work = options.model == "gpt" ? transformer(options, world.rank())
                                           : perceptron(options, world.rank());
  std::optional<Ddp> ddp;
  DdpOptions ddp_options;
  if (!options.bucket_kib.empty()) ddp_options.bucket_bytes.clear();
  for (const int64_t kib : options.bucket_kib) ddp_options.bucket_bytes.push_back(kib << 10);
  if (options.mode == "ddp") ddp.emplace(*work.module, world.group(), ddp_options);
  Stepper optimizer = optimizer_of(options, *work.module, world.group());
  const auto parameters = work.module->parameters();
  const auto loss_of = [&](const bench::Batch& batch) {
    const Autocast autocast(at::kCPU, options.dtype == "bf16" ? at::kBFloat16 : at::kFloat);
    return work.loss(batch);
  };

  std::vector<double> steps, updates;
  std::vector<Tensor> losses;
  Clock::time_point begin;
  int64_t next = 0;
  for (int64_t step = 0; step < options.warmup + options.steps; ++step) {
    if (step == options.warmup) {
      world.group().barrier().wait();
      steps.clear();
      updates.clear();
      begin = Clock::now();
    }
    const auto start = Clock::now();
    if (ddp) {
      ddp->zero_grad();
    } else {
      for (const auto& parameter : parameters) parameter.mutable_grad().reset();
    }
    for (int64_t micro = 0; micro < options.accumulate; ++micro) {
      std::optional<parallel::Hold> hold;
      if (ddp && micro + 1 < options.accumulate) hold.emplace(ddp->hold());
      const Tensor loss = loss_of(work.batches[next++ % work.batches.size()]);
      loss.backward();
      losses.push_back(loss.detach());
    }
    const auto computed = Clock::now();
    optimizer.step();
    const auto end = Clock::now();
    steps.push_back(us(end - start));
    updates.push_back(us(end - computed));
  }
  const double seconds = us(Clock::now() - begin) / 1e6;
  const double own_rate =
      static_cast<double>(options.steps * options.accumulate * options.batch) / seconds;

  nlohmann::json line = {{"model", options.model},
                         {"mode", options.mode},
                         {"world", world.size()},
                         {"optimizer", options.optimizer},
                         {"dtype", options.dtype}};
  double rate = 0;
  for (const auto& text : world.group().all_gather_bytes(fmt::format("{:.17g}", own_rate)))
    rate += std::stod(text);
  line["samples_per_s"] = rate;
  line["step_us"] = median(steps);
  line["update_us"] = median(updates);
  line["final_loss"] =
      torch::stack(at::TensorList(losses).slice(losses.size() - std::min<size_t>(losses.size(), 5)))
          .mean()
          .item<double>();
  line["peak_rss_mb"] = example::peak_rss_mb();
  if (ddp && world.size() > 1) {
    const DdpLog log = ddp->log();
    line.update(communication_of(log, world));
    line["passes"] = log.pass_count;
    line["buckets"] = log.bucket_bytes.size();
    if (!options.trace.empty())
      std::ofstream(fmt::format("{}.{}", options.trace, world.rank())) << log.chrome_trace();
  }
  if (world.is_main()) std::puts(line.dump().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times training steps");
  Options options;
  app.add_option("--model", options.model)
      ->check(CLI::IsMember({"gpt", "mlp"}))
      ->capture_default_str();
  app.add_option("--mode", options.mode, "bare: ranks that know nothing of each other, without Ddp")
      ->check(CLI::IsMember({"ddp", "bare"}))
      ->capture_default_str();
  app.add_option("--optimizer", options.optimizer,
                 "AdamW: libtorch's, in one pass, or divided over the ranks")
      ->check(CLI::IsMember({"torch", "fused", "zero"}))
      ->capture_default_str();
  app.add_option("--dtype", options.dtype, "bf16: autocast")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
  app.add_option("--steps", options.steps)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--warmup", options.warmup)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--batch", options.batch, "per rank")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--accumulate", options.accumulate, "batches per step")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--threads", options.threads, "per rank")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--bucket-kib", options.bucket_kib, "of the first bucket, the next and so on")
      ->delimiter(',');
  app.add_option("--seed", options.seed)->capture_default_str();
  app.add_option("--trace", options.trace, "write FILE.RANK for Chrome's tracing");
  CLI11_PARSE(app, argc, argv);
  try {
    measure(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
