// Holds what a plan says of a configuration against what is measured: the peak memory of one
// training, or the step times of several strategies, which train by turns in the same processes, so
// that what disturbs the machine for longer than a turn disturbs all. Prints one JSON line.
// make plan-bars runs it for all configurations.
#include <fmt/format.h>
#include <lockstep/lockstep.h>
#include <lockstep/models/models.h>
#include <lockstep/parallel/fused_adam.h>
#include <lockstep/plan/measure.h>
#include <lockstep/plan/placement.h>
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
  Modules units;  // of Fsdp, and what is recomputed
  // Of one batch of so many samples.
  std::function<std::function<Tensor()>(int64_t)> loss_of;
  std::function<Tensor()> loss;
};

Job with_loss(Job job, int64_t batch) {
  job.loss = job.loss_of(batch);
  return job;
}

Job classifier(const train::ModelConfig& model, const plan::SampleSizes& sample, int64_t batch,
               auto net) {
  const auto loss_of = [=](int64_t samples) -> std::function<Tensor()> {
    std::vector<int64_t> sizes = {samples};
    sizes.insert(sizes.end(), sample.data.begin(), sample.data.end());
    const Tensor x = torch::rand(sizes), y = torch::randint(sample.outputs, {samples});
    return [=]() mutable { return at::cross_entropy_loss(call(net, x), y); };
  };
  train::RunConfig config;
  config.model = model;
  return with_loss({.profile = plan::profile_of(config, sample),
                    .module = net.ptr(),
                    .units = {},
                    .loss_of = loss_of,
                    .loss = {}},
                   batch);
}

Job perceptron(std::vector<int64_t> hidden, int64_t batch) {
  std::vector<int64_t> sizes = {784};
  sizes.insert(sizes.end(), hidden.begin(), hidden.end());
  sizes.push_back(10);
  return classifier({.kind = "mlp", .mlp = {.hidden = hidden}}, {{784}, 10}, batch,
                    models::Mlp(models::MlpOptions{.sizes = sizes}));
}

Job transformer(const models::TransformerOptions& o, int64_t tokens, int64_t batch) {
  models::Transformer net(o);
  const auto loss_of = [=](int64_t samples) -> std::function<Tensor()> {
    const Tensor ids = torch::randint(o.vocabulary, {samples, tokens}),
                 targets = torch::randint(o.vocabulary, {samples, tokens});
    return [=]() mutable { return call(net, ids, targets); };
  };
  return with_loss(
      {.profile = plan::transformer_profile(plan::sizes_of(o), tokens, plan::Precision::Float),
       .module = net.ptr(),
       .units = net->recomputed(models::Recomputed::Full),
       .loss_of = loss_of,
       .loss = {}},
      batch);
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

// A number of bytes that a file of the process's memory has after `key`.
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

struct Arguments {
  std::string model = "mlp-small", machine;
  std::vector<std::string> strategies = {"ddp"};
  int64_t batch = 64, turns = 0, evaluated = 0;
  std::string hook = "none";
  bool recompute = false;
};

// From the first step on.
std::shared_ptr<CommHook> hook_named(const std::string& name) {
  if (name == "bf16") return std::make_shared<CastHook>(torch::kBFloat16);
  if (name == "power_sgd") return std::make_shared<PowerSgd>(PowerSgdOptions{.start_iteration = 1});
  if (name == "top_k") return std::make_shared<TopK>();
  if (name == "none") return nullptr;
  throw ConfigError("unknown hook " + name);
}

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

double median(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::ranges::nth_element(values, middle);
  return *middle;
}

// One model in training by one strategy.
class Trained {
 public:
  Trained(const World& world, const Arguments& arguments, const std::string& strategy)
      : job_(job_of(arguments.model, arguments.batch)) {
    const Group group = world.group();
    const auto options = torch::optim::AdamWOptions(1e-4);
    if (strategy.starts_with("fsdp")) {
      fsdp_.emplace(
          job_.module, group,
          FsdpOptions{.units = job_.units,
                      .sharding = strategy == "fsdp" ? Sharding::Full : Sharding::Gradients});
      adam_ = std::make_unique<FusedAdamW>(fsdp_->parameters(), options);
    } else {
      ddp_.emplace(*job_.module, world, DdpOptions{.hook = hook_named(arguments.hook)});
      if (strategy == "zero") {
        adam_ = std::make_unique<ZeroOptimizer>(job_.module->parameters(), group,
                                                zero<FusedAdamW>(options));
      } else {
        adam_ = std::make_unique<FusedAdamW>(job_.module->parameters(), options);
      }
    }
    if (arguments.recompute) twice_.emplace(job_.units);
  }

  void step() {
    if (fsdp_) {
      fsdp_->zero_grad();
    } else {
      ddp_->zero_grad();
    }
    job_.loss().backward();
    adam_->step();
  }

  void evaluate(int64_t batch) {
    const torch::NoGradGuard no_grad;
    job_.module->eval();
    job_.loss_of(batch)();
    job_.module->train();
  }

  // Seconds of a step on the slowest rank: the median of as many as take about a fifth of a second,
  // and of two at least.
  double seconds(const Group& group) {
    const auto timed = [&] {
      const auto begin = Clock::now();
      step();
      return std::chrono::duration<double>(Clock::now() - begin).count();
    };
    const int count = std::clamp(static_cast<int>(0.2 / slowest(group, timed())), 2, 100);
    std::vector<double> all;
    for (int i = 0; i < count; ++i) all.push_back(timed());
    return slowest(group, median(all));
  }

  const plan::ModelProfile& profile() const { return job_.profile; }

 private:
  Job job_;
  std::optional<Ddp> ddp_;
  std::optional<Fsdp> fsdp_;
  std::unique_ptr<torch::optim::Optimizer> adam_;
  std::optional<ActivationCheckpointing> twice_;
};

// Bytes, on the rank that has most. `evaluated`: samples of an evaluation after each step, or 0.
double peak_of(const Group& group, Trained& trained, int64_t evaluated) {
  const auto make_steps = [&](int count) {
    for (int i = 0; i < count; ++i) {
      trained.step();
      if (evaluated > 0) trained.evaluate(evaluated);
    }
  };
  make_steps(3);
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak begins again
  make_steps(6);
  // Of what ranks share each has an equal part, whichever of them has touched it.
  const double shared = mean(group, kib_of("/proc/self/smaps_rollup", "Pss_Shmem:"));
  const double peak = slowest(group, private_peak()) + shared;
  group.barrier().wait();  // no rank unmaps what is shared while another one counts it
  return peak;
}

// Seconds of a forward and backward pass without communication, the median of the turns; and of
// each strategy's step, the median of what it took beside the same turn's pass.
struct Times {
  double pass = 0;
  std::vector<double> steps;
  // Of each strategy by turn, beside that turn's pass.
  std::vector<std::vector<double>> turns;
};

Times times_of(const World& world, const Arguments& arguments) {
  const Group group = world.group();
  Job alone = job_of(arguments.model, arguments.batch);
  std::vector<std::unique_ptr<Trained>> all;
  for (const auto& strategy : arguments.strategies)
    all.push_back(std::make_unique<Trained>(world, arguments, strategy));
  std::vector<double> passes;
  std::vector<std::vector<double>> steps(all.size());
  for (int64_t turn = -1; turn < arguments.turns; ++turn) {  // the first is for warming up
    group.barrier().wait();
    const double pass = slowest(group, plan::measure_pass(*alone.module, alone.loss, 3).seconds);
    if (turn >= 0) passes.push_back(pass);
    for (size_t i = 0; i < all.size(); ++i) {
      const size_t which = turn % 2 == 0 ? i : all.size() - 1 - i;
      group.barrier().wait();
      const double step = all[which]->seconds(group);
      if (turn >= 0) steps[which].push_back(step / pass);
    }
  }
  Times out{.pass = median(passes)};
  for (const auto& of_one : steps) out.steps.push_back(out.pass * median(of_one));
  out.turns = std::move(steps);
  return out;
}

nlohmann::ordered_json memory_of(const World& world, const Arguments& arguments,
                                 const plan::Machine& machine, const plan::Training& training) {
  const auto& strategy = arguments.strategies.front();
  Trained trained(world, arguments, strategy);
  const double measured = peak_of(world.group(), trained, arguments.evaluated);
  const auto planned =
      plan::memory_of(trained.profile(), training, strategy_named(strategy), machine, world.size());
  return {{"measured", measured}, {"plan", planned.total}};
}

nlohmann::ordered_json time_of(const World& world, const Arguments& arguments,
                               const plan::Machine& machine, const plan::Training& training) {
  const auto profile = job_of(arguments.model, arguments.batch).profile;
  const Times times = times_of(world, arguments);
  plan::Training timed = training;
  timed.measured_pass = times.pass;
  nlohmann::ordered_json steps;
  for (size_t i = 0; i < arguments.strategies.size(); ++i) {
    const auto strategy = strategy_named(arguments.strategies[i]);
    const auto time = plan::time_of(profile, timed, strategy, machine, world.size());
    const auto estimated = plan::time_of(profile, training, strategy, machine, world.size());
    steps[arguments.strategies[i]] = {
        {"measured", times.steps[i]},      {"plan", time.total},
        {"turns", times.turns[i]},         {"estimated", estimated.total},
        {"computation", time.computation}, {"slowdown", time.slowdown},
        {"waiting", time.waiting},         {"update", time.update}};
  }
  const auto advice = plan::make_plan(profile, timed, machine, {.ranks = world.size()}).best;
  return {
      {"pass", times.pass}, {"advice", advice ? flag_of(advice->strategy) : ""}, {"steps", steps}};
}

int run(int argc, char** argv) {
  Arguments arguments;
  CLI::App app;
  app.add_option("--model", arguments.model);
  app.add_option("--strategies", arguments.strategies)->delimiter(',');
  app.add_option("--machine", arguments.machine)->required();
  app.add_option("--batch", arguments.batch);
  app.add_option("--turns", arguments.turns);  // of step times; without them, the peak of the first
  app.add_option("--hook", arguments.hook);
  app.add_option("--evaluate", arguments.evaluated);  // samples
  app.add_flag("--recompute", arguments.recompute);
  CLI11_PARSE(app, argc, argv);
  const World world = World::from_env();
  torch::manual_seed(1);
  const auto machine = plan::read_machine(arguments.machine);
  plan::Training training = {.batch = arguments.batch};
  if (arguments.recompute) training.recomputed = plan::Recomputed::Blocks;
  if (arguments.evaluated > 0) training.evaluation_batch = arguments.evaluated;
  if (arguments.hook == "bf16") training.sent_bytes = 2;
  if (arguments.hook == "power_sgd") training.feedback = plan::Feedback::PowerSgd;
  if (arguments.hook == "top_k") training.feedback = plan::Feedback::TopK;
  const auto row = arguments.turns == 0 ? memory_of(world, arguments, machine, training)
                                        : time_of(world, arguments, machine, training);
  if (world.is_main()) fmt::print("{}\n", row.dump());
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  return run(argc, argv);
} catch (const std::exception& error) {
  fmt::print(stderr, "error: {}\n", error.what());
  return 1;
}
