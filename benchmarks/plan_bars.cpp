// Trains one configuration for some steps and holds peak memory and step time against what a plan
// says of it. Prints one JSON line. make plan-bars runs it for all configurations.
#include <fmt/format.h>
#include <lockstep/lockstep.h>
#include <lockstep/models/models.h>
#include <lockstep/parallel/fused_adam.h>
#include <lockstep/plan/measure.h>
#include <lockstep/plan/plan.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace lockstep;
using torch::Tensor;
using Clock = std::chrono::steady_clock;
using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

// A model as a plan counts it, and as it is trained.
struct Job {
  plan::ModelProfile profile;
  std::shared_ptr<torch::nn::Module> module;
  Modules units;  // of Fsdp, and what is computed twice
  std::function<Tensor()> loss;
};

Job classifier(const train::ModelConfig& model, const plan::SampleSizes& sample, int64_t batch,
               auto net) {
  std::vector<int64_t> sizes = {batch};
  sizes.insert(sizes.end(), sample.data.begin(), sample.data.end());
  const Tensor x = torch::rand(sizes), y = torch::randint(sample.outputs, {batch});
  train::RunConfig config;
  config.model = model;
  return {.profile = plan::profile_of(config, sample),
          .module = net.ptr(),
          .units = {},
          .loss = [=]() mutable { return at::cross_entropy_loss(call(net, x), y); }};
}

Job perceptron(std::vector<int64_t> hidden, int64_t batch) {
  std::vector<int64_t> sizes = {784};
  sizes.insert(sizes.end(), hidden.begin(), hidden.end());
  sizes.push_back(10);
  return classifier({.kind = "mlp", .mlp = {.hidden = hidden}}, {{784}, 10}, batch,
                    models::Mlp(models::MlpOptions{.sizes = sizes}));
}

Job transformer(const train::TransformerConfig& o, int64_t tokens, int64_t batch) {
  models::Transformer net({.vocabulary = o.vocabulary,
                           .layers = o.layers,
                           .hidden = o.hidden,
                           .heads = o.heads,
                           .tied = o.tied});
  const Tensor ids = torch::randint(o.vocabulary, {batch, tokens}),
               targets = torch::randint(o.vocabulary, {batch, tokens});
  return {.profile = plan::transformer_profile(o, tokens, plan::Precision::Float),
          .module = net.ptr(),
          .units = net->recomputed(models::Recomputed::Full),
          .loss = [=]() mutable { return call(net, ids, targets); }};
}

Job job_of(const std::string& model, int64_t batch) {
  if (model == "mlp-small") return perceptron({256}, batch);
  if (model == "mlp-large") return perceptron({2048, 2048}, batch);
  if (model == "convnet") {
    return classifier({.kind = "convnet", .convnet = {.channels = {32, 64}}}, {{3, 32, 32}, 10},
                      batch, models::ConvNet({.in_channels = 3, .channels = {32, 64}}));
  }
  if (model == "resnet18") {
    Job job =
        classifier({.kind = "resnet18", .resnet18 = {.small_images = true}}, {{3, 32, 32}, 10},
                   batch, models::ResNet18({.classes = 10, .small_images = true}));
    job.units = units_of(*job.module, {"BasicBlock"});
    return job;
  }
  if (model == "gpt-small") {
    return transformer({.vocabulary = 1024, .layers = 4, .hidden = 256, .heads = 4, .tied = true},
                       128, batch);
  }
  if (model == "gpt-large") {
    return transformer({.vocabulary = 4096, .layers = 6, .hidden = 512, .heads = 8, .tied = true},
                       128, batch);
  }
  throw ConfigError("unknown model " + model);
}

// A number of bytes that a file of the process's memory has behind `key`.
double kib_of(const char* file, const std::string& key) {
  std::ifstream in(file);
  for (std::string word; in >> word;) {
    double value = 0;
    if (word == key && in >> value) return 1024 * value;
  }
  return 0;
}

// The peak of this process without what it shares with other ranks.
double private_peak() {
  return kib_of("/proc/self/status", "VmHWM:") - kib_of("/proc/self/status", "RssShmem:");
}

struct Measured {
  double before = 0, peak = 0;  // bytes
  double step = 0;              // seconds, the median
};

struct Arguments {
  std::string model = "mlp-small", strategy = "ddp", machine;
  int64_t batch = 64;
  double seconds = 1, pass = 0;
  bool recompute = false;
};

constexpr std::array kStrategies = {std::pair{"ddp", plan::Strategy::Ddp},
                                    std::pair{"zero", plan::Strategy::Zero},
                                    std::pair{"fsdp-gradients", plan::Strategy::FsdpGradients},
                                    std::pair{"fsdp", plan::Strategy::FsdpFull}};

plan::Strategy strategy_named(const std::string& name) {
  for (const auto& [known, strategy] : kStrategies) {
    if (name == known) return strategy;
  }
  throw ConfigError("unknown strategy " + name);
}

std::string flag_of(plan::Strategy strategy) {
  for (const auto& [name, known] : kStrategies) {
    if (strategy == known) return name;
  }
  return "";
}

double slowest(const Group& group, double value) {
  const Tensor one = torch::full({1}, value, torch::kDouble);
  group.all_reduce(one, comm::ReduceOp::Max).wait();
  return one.item<double>();
}

double mean(const Group& group, double value) {
  const Tensor one = torch::full({1}, value, torch::kDouble);
  group.all_reduce(one, comm::ReduceOp::Average).wait();
  return one.item<double>();
}

Measured train(const World& world, Job& job, const Arguments& arguments) {
  const Group group = world.group();
  Measured out{.before = kib_of("/proc/self/status", "VmRSS:")};
  std::optional<Ddp> ddp;
  std::optional<Fsdp> fsdp;
  std::unique_ptr<torch::optim::Optimizer> adam;
  const auto options = torch::optim::AdamWOptions(1e-4);
  if (arguments.strategy.starts_with("fsdp")) {
    fsdp.emplace(job.module, group,
                 FsdpOptions{.units = job.units,
                             .sharding = arguments.strategy == "fsdp" ? Sharding::Full
                                                                      : Sharding::Gradients});
    adam = std::make_unique<FusedAdamW>(fsdp->parameters(), options);
  } else {
    ddp.emplace(*job.module, world);
    if (arguments.strategy == "zero") {
      adam = std::make_unique<ZeroOptimizer>(job.module->parameters(), group,
                                             zero<FusedAdamW>(options));
    } else {
      adam = std::make_unique<FusedAdamW>(job.module->parameters(), options);
    }
  }
  std::optional<ActivationCheckpointing> twice;
  if (arguments.recompute) twice.emplace(job.units);
  const auto step = [&] {
    if (fsdp) {
      fsdp->zero_grad();
    } else {
      ddp->zero_grad();
    }
    job.loss().backward();
    adam->step();
  };
  for (int i = 0; i < 3; ++i) step();
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak begins anew
  const auto first = Clock::now();
  step();
  const double about = slowest(group, std::chrono::duration<double>(Clock::now() - first).count());
  const int count = std::clamp(static_cast<int>(arguments.seconds / about), 5, 500);
  std::vector<double> seconds;
  for (int i = 0; i < count; ++i) {
    const auto begin = Clock::now();
    step();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::ranges::nth_element(seconds, seconds.begin() + count / 2);
  out.step = slowest(group, seconds[static_cast<size_t>(count / 2)]);
  // Of what ranks share each has an equal part, whichever of them has touched it.
  const double shared = mean(group, kib_of("/proc/self/smaps_rollup", "Pss_Shmem:"));
  out.peak = slowest(group, private_peak()) + shared;
  group.barrier().wait();  // nobody unmaps what is shared while another one counts it
  return out;
}

int run(int argc, char** argv) {
  Arguments arguments;
  CLI::App app;
  app.add_option("--model", arguments.model);
  app.add_option("--strategy", arguments.strategy);
  app.add_option("--machine", arguments.machine)->required();
  app.add_option("--batch", arguments.batch);
  app.add_option("--seconds", arguments.seconds);
  app.add_option("--pass", arguments.pass);  // seconds; without it they are measured
  app.add_flag("--recompute", arguments.recompute);
  CLI11_PARSE(app, argc, argv);
  const World world = World::from_env();
  torch::manual_seed(1);
  Job job = job_of(arguments.model, arguments.batch);

  // The time of a pass is measured by a process of its own: what it leaves in the allocator is no
  // memory of the training.
  if (arguments.pass == 0) {
    plan::measure_pass(*job.module, job.loss, 1);
    world.group().barrier().wait();
    const double pass =
        slowest(world.group(), plan::measure_pass(*job.module, job.loss, 9).seconds);
    if (world.is_main()) fmt::print("{}\n", nlohmann::json{{"pass", pass}}.dump());
    return 0;
  }

  // What plan is told: the machine, and that time.
  const auto machine = plan::read_machine(arguments.machine);
  plan::Training training = {.batch = arguments.batch};
  if (arguments.recompute) training.recomputed = plan::Recomputed::Blocks;
  const auto strategy = strategy_named(arguments.strategy);
  const auto estimated =
      plan::time_of(job.profile, training, strategy, machine, world.size()).total;
  training.measured_pass = arguments.pass;
  const auto advice = plan::make_plan(job.profile, training, machine, {.ranks = world.size()}).best;
  const auto time = plan::time_of(job.profile, training, strategy, machine, world.size());
  const auto memory = plan::memory_of(job.profile, training, strategy, machine, world.size());

  const Measured measured = train(world, job, arguments);
  if (!world.is_main()) return 0;
  const nlohmann::ordered_json out = {
      {"model", arguments.model},
      {"batch", arguments.batch},
      {"ranks", world.size()},
      {"strategy", arguments.strategy},
      {"recompute", arguments.recompute},
      {"advice", advice ? flag_of(advice->strategy) : ""},
      {"step", {{"measured", measured.step}, {"plan", time.total}, {"estimated", estimated}}},
      {"parts",
       {{"pass", training.measured_pass},
        {"computation", time.computation},
        {"slowdown", time.slowdown},
        {"waiting", time.waiting},
        {"update", time.update}}},
      {"peak", {{"measured", measured.peak}, {"plan", memory.total}}},
      {"tensors", {{"measured", measured.peak - measured.before}, {"plan", memory.tensors}}}};
  fmt::print("{}\n", out.dump());
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  return run(argc, argv);
} catch (const std::exception& error) {
  fmt::print(stderr, "error: {}\n", error.what());
  return 1;
}
