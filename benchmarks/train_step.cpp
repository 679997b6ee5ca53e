// Times training steps of a model on made data, on any number of ranks and on GPUs where the ranks
// have any (LOCKSTEP_DEVICE), and says where the time goes. Prints one JSON line. On a GPU the
// times of steps and updates are the host's, which enqueues them.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/lockstep.h>
#include <lockstep/parallel/fused_adam.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "../examples/measure.h"
#include "device.h"
#include "gpt.h"

namespace {

using namespace lockstep;
using torch::Tensor;
using Clock = std::chrono::steady_clock;

struct Options {
  std::string model = "gpt", optimizer = "fused", dtype = "fp32", trace;
  std::vector<std::string> modes = {"ddp"};
  int64_t steps = 30, turns = 20, warmup = 5, batch = 8, accumulate = 1, threads = 1;
  std::vector<int64_t> bucket_kib;
  bench::GptShape shape;
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
    return at::cross_entropy_loss(call(net, batch.x), batch.y);
  };
  return work;
}

Work transformer(const Options& options, int rank) {
  const bench::GptShape& shape = options.shape;
  bench::Gpt net(shape);
  Work work{.module = net.ptr(),
            .batches = bench::synthetic_tokens(shape, options.batch, 1000 * options.seed + rank),
            .loss = {}};
  work.loss = [net](const bench::Batch& batch) mutable {
    return at::cross_entropy_loss(call(net, batch.x).flatten(0, 1), batch.y.flatten());
  };
  return work;
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const std::string& kind,
                                                      std::vector<Tensor> parameters,
                                                      const Group& group) {
  const auto adamw = torch::optim::AdamWOptions(3e-4).weight_decay(0.01);
  if (kind == "zero") {
    return std::make_unique<ZeroOptimizer>(std::move(parameters), group, zero<FusedAdamW>(adamw));
  }
  if (kind == "fused") return std::make_unique<FusedAdamW>(std::move(parameters), adamw);
  return std::make_unique<torch::optim::AdamW>(std::move(parameters), adamw);
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

// Parameters, gradients and AdamW's averages that this rank keeps between steps.
double state_mb(const std::vector<Tensor>& parameters, torch::optim::Optimizer& optimizer) {
  size_t bytes = 0;
  for (const auto& parameter : parameters) {
    bytes += parameter.nbytes() + (parameter.grad().defined() ? parameter.grad().nbytes() : 0);
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    const auto& state = static_cast<const torch::optim::AdamWParamState&>(*found->second);
    bytes += state.exp_avg().nbytes() + state.exp_avg_sq().nbytes();
  }
  return static_cast<double>(bytes) / (1 << 20);
}

// One model in training: attached to the group; on its own; or on its own except that ranks wait
// for each other at a barrier in each step, which is the least that synchronous training costs
// here.
class Training {
 public:
  Training(const Options& options, const World& world, const std::string& mode)
      : options_(options),
        device_(world.device()),
        barrier_(mode == "barrier" ? std::optional(world.group()) : std::nullopt),
        work_(options.model == "gpt" ? transformer(options, world.rank())
                                     : perceptron(options, world.rank())) {
    work_.module->to(device_);
    parameters_ = work_.module->parameters();
    for (auto& [x, y] : work_.batches) {
      x = x.to(device_);
      y = y.to(device_);
    }
    DdpOptions ddp_options;
    if (!options.bucket_kib.empty()) ddp_options.bucket_bytes.clear();
    for (const int64_t kib : options.bucket_kib) ddp_options.bucket_bytes.push_back(kib << 10);
    const bool attached = mode == "ddp" || mode == "lanes";
    if (mode == "lanes") {
      ddp_options.lanes = options.accumulate * world.size();
      ddp_options.threads = static_cast<int>(options.threads);
    }
    if (attached) ddp_.emplace(*work_.module, world.group(), ddp_options);
    if (mode == "fsdp") {
      fsdp_.emplace(work_.module, world.group(),
                    FsdpOptions{.units = units_of<bench::BlockImpl>(*work_.module)});
      parameters_ = fsdp_->parameters();
    }
    const bool divides = options.optimizer == "zero";
    optimizer_ = optimizer_of(divides && !attached ? "fused" : options.optimizer, parameters_,
                              world.group());
  }

  // Samples per second of this rank over this many steps.
  double run(int64_t count) {
    const auto begin = Clock::now();
    for (int64_t step = 0; step < count; ++step) this->step();
    bench::finish(device_);
    return static_cast<double>(count * options_.accumulate * options_.batch) /
           (us(Clock::now() - begin) / 1e6);
  }

  void forget_times() {
    steps_.clear();
    updates_.clear();
  }
  double step_us() const { return median(steps_); }
  double update_us() const { return median(updates_); }
  // The mean of the latest few, or of all where there are fewer.
  double latest_loss() const {
    const auto count = std::min(next_, losses_.size());
    return torch::stack(at::TensorList(losses_.data(), count)).mean().item<double>();
  }
  const std::optional<Ddp>& ddp() const { return ddp_; }
  int64_t parameter_count() const {
    int64_t count = 0;
    for (const auto& parameter : work_.module->parameters()) count += parameter.numel();
    return count;
  }
  double kept_mb() const { return state_mb(parameters_, *optimizer_); }

 private:
  void step() {
    const auto start = Clock::now();
    if (ddp_) {
      ddp_->zero_grad();
    } else if (fsdp_) {
      fsdp_->zero_grad();
    } else {
      for (const auto& parameter : parameters_) parameter.mutable_grad().reset();
    }
    if (ddp_ && ddp_->lane_count() > 0) {
      const StepKey key{.seed = options_.seed, .step = static_cast<int64_t>(next_)};
      for ([[maybe_unused]] const Lane lane : ddp_->lanes(key)) micro_batch();
    } else {
      for (int64_t micro = 0; micro < options_.accumulate; ++micro) {
        std::optional<parallel::Hold> hold;
        const bool holds = micro + 1 < options_.accumulate;
        if (ddp_ && holds) hold.emplace(ddp_->hold());
        if (fsdp_ && holds) hold.emplace(fsdp_->hold());
        micro_batch();
      }
    }
    const auto computed = Clock::now();
    if (barrier_) barrier_->barrier().wait();
    optimizer_->step();
    const auto end = Clock::now();
    steps_.push_back(us(end - start));
    updates_.push_back(us(end - computed));
  }

  void micro_batch() {
    const Tensor loss = loss_of(work_.batches[next_ % work_.batches.size()]);
    loss.backward();
    losses_[next_++ % losses_.size()] = loss.detach();
  }

  Tensor loss_of(const bench::Batch& batch) const {
    const Autocast autocast(device_, options_.dtype == "bf16" ? at::kBFloat16 : at::kFloat);
    return work_.loss(batch);
  }

  const Options& options_;
  at::Device device_;
  std::optional<Group> barrier_;
  Work work_;
  std::vector<Tensor> parameters_;
  std::optional<Ddp> ddp_;
  std::optional<Fsdp> fsdp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<double> steps_, updates_;
  // Not all: small tensors that stay leave the memory of large ones in pieces.
  std::array<Tensor, 5> losses_;
  size_t next_ = 0;
};

std::vector<double> of_ranks(const World& world, double own) {
  std::vector<double> all;
  for (const auto& text : world.group().all_gather_bytes(fmt::format("{:.17g}", own)))
    all.push_back(std::stod(text));
  return all;
}

double sum_over_ranks(const World& world, double own) {
  const auto all = of_ranks(world, own);
  return std::reduce(all.begin(), all.end());
}

// Memory of this process, shared pages divided among those that map them.
double pss_mb() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string word;
  double kib = 0;
  while (file >> word) {
    if (word == "Pss:") file >> kib;
  }
  return kib / 1024;
}

nlohmann::json one_training(const Options& options, const World& world) {
  Training training(options, world, options.modes.front());
  training.run(options.warmup);
  training.forget_times();
  world.group().barrier().wait();
  const double own_rate = training.run(options.steps);

  nlohmann::json line;
  line["samples_per_s"] = sum_over_ranks(world, own_rate);
  line["parameters"] = training.parameter_count();
  line["step_us"] = training.step_us();
  line["update_us"] = training.update_us();
  line["final_loss"] = training.latest_loss();
  // While the model, its gradients and the optimizer's state are there.
  world.group().barrier().wait();
  line["pss_mb"] = sum_over_ranks(world, pss_mb());
  line["kept_mb"] = std::ranges::max(of_ranks(world, training.kept_mb()));
  if (training.ddp() && world.size() > 1) {
    const DdpLog log = training.ddp()->log();
    line.update(communication_of(log, world));
    line["passes"] = log.pass_count;
    line["buckets"] = log.bucket_bytes.size();
    if (!options.trace.empty())
      std::ofstream(fmt::format("{}.{}", options.trace, world.rank())) << log.chrome_trace();
  }
  return line;
}

// Several models in the same processes, by turns: whatever disturbs the machine for longer than a
// turn disturbs all.
nlohmann::json by_turns(const Options& options, const World& world) {
  std::vector<std::unique_ptr<Training>> trainings;
  for (const auto& mode : options.modes) {
    trainings.push_back(std::make_unique<Training>(options, world, mode));
    trainings.back()->run(options.warmup);
  }
  const size_t count = trainings.size();
  nlohmann::json rates;
  for (size_t turn = 0; turn < static_cast<size_t>(options.turns); ++turn) {
    for (size_t i = 0; i < count; ++i) {
      const size_t which = turn % 2 == 0 ? i : count - 1 - i;
      world.group().barrier().wait();
      const double own_rate = trainings[which]->run(options.steps);
      rates[options.modes[which]].push_back(sum_over_ranks(world, own_rate));
    }
  }
  return {{"samples_per_s", rates}};
}

void measure(const Options& options) {
  const World world = World::from_env();
  at::set_num_threads(static_cast<int>(options.threads));
  torch::manual_seed(options.seed);
  nlohmann::json line = {
      {"model", options.model},         {"mode", fmt::to_string(fmt::join(options.modes, ","))},
      {"world", world.size()},          {"device", world.device().str()},
      {"optimizer", options.optimizer}, {"dtype", options.dtype}};
  line.update(options.modes.size() > 1 ? by_turns(options, world) : one_training(options, world));
  line["peak_rss_mb"] = example::peak_rss_mb();
  if (world.is_main()) std::puts(line.dump().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times training steps");
  Options options;
  app.add_option("--model", options.model)
      ->check(CLI::IsMember({"gpt", "mlp"}))
      ->capture_default_str();
  app.add_option(
         "--mode", options.modes,
         "bare: ranks that know nothing of each other, without Ddp; barrier: the same, but they "
         "wait for each other in each step; fsdp: divided over the ranks; lanes: as many a rank as "
         "batches "
         "accumulate; several of these by turns")
      ->delimiter(',')
      ->check(CLI::IsMember({"ddp", "fsdp", "bare", "barrier", "lanes"}))
      ->capture_default_str();
  app.add_option(
         "--optimizer", options.optimizer,
         "AdamW: libtorch's, in one pass, or divided over the ranks (in one pass where bare)")
      ->check(CLI::IsMember({"torch", "fused", "zero"}))
      ->capture_default_str();
  app.add_option("--dtype", options.dtype, "bf16: autocast")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
  app.add_option("--steps", options.steps, "in each turn, where there are several modes")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--turns", options.turns, "of several modes")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--warmup", options.warmup)
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--batch", options.batch, "per rank")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--accumulate", options.accumulate, "batches per step")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "per rank")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--bucket-kib", options.bucket_kib, "of the first bucket, the next and so on")
      ->delimiter(',');
  for (const auto& [flag, size] :
       {std::pair("--width", &options.shape.width), std::pair("--layers", &options.shape.layers),
        std::pair("--length", &options.shape.length), std::pair("--heads", &options.shape.heads),
        std::pair("--vocab", &options.shape.vocab)}) {
    app.add_option(flag, *size, "of gpt")->check(CLI::Range(1, 1'000'000))->capture_default_str();
  }
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
