// A Trainer against a loop by hand: the same model, data, optimizer and order, in the same
// processes, by turns of an epoch. Prints one JSON line with samples per second of both, and
// fails where the two leave different parameters.
#include <fmt/format.h>
#include <lockstep/lockstep.h>
#include <lockstep/parallel/fused_adam.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <nlohmann/json.hpp>

#include "gpt.h"

namespace {

using namespace lockstep;
using Clock = std::chrono::steady_clock;

struct Options {
  std::string model = "mlp";
  int64_t steps = 300, turns = 21, batch = 64, threads = 1;
};

// What both train: made twice in the same way.
struct Work {
  train::Model model;
  std::shared_ptr<data::TensorDataset> data;
  train::Loss loss;
};

Work perceptron(const Options& options, int ranks) {
  torch::nn::Sequential net(torch::nn::Linear(784, 256), torch::nn::ReLU(),
                            torch::nn::Linear(256, 10));
  const int64_t count = options.batch * ranks * options.steps;
  return {.model = net,
          .data = std::make_shared<data::TensorDataset>(torch::rand({count, 784}),
                                                        torch::randint(10, {count}, torch::kLong)),
          .loss = train::cross_entropy()};
}

Work transformer(const Options& options, int ranks) {
  const bench::GptShape shape;
  bench::Gpt net(shape);
  std::vector<at::Tensor> x, y;
  const auto batches = bench::synthetic_tokens(shape, options.batch * ranks, 1);
  for (int64_t step = 0; step < options.steps; ++step) {
    const auto& batch = batches[static_cast<size_t>(step) % batches.size()];
    x.push_back(batch.x);
    y.push_back(batch.y);
  }
  return {.model = net,
          .data = std::make_shared<data::TensorDataset>(at::cat(x), at::cat(y)),
          .loss = [](const at::Tensor& output, const at::Tensor& target) {
            return at::cross_entropy_loss(output.flatten(0, 1), target.flatten());
          }};
}

Work work_of(const Options& options, const World& world) {
  torch::manual_seed(1);
  return options.model == "gpt" ? transformer(options, world.size())
                                : perceptron(options, world.size());
}

// The loop that a program would write: the README's.
class Loop {
 public:
  Loop(const Options& options, const World& world)
      : work_(work_of(options, world)),
        loader_(*work_.data, world, {.batch_size = options.batch, .seed = 1, .drop_last = true}),
        ddp_(work_.model.module(), world),
        adam_(work_.model.module().parameters(), torch::optim::AdamWOptions(1e-3)) {}

  // One epoch.
  void run() {
    for (const auto& [x, y] : loader_.epoch(epoch_++)) {
      ddp_.zero_grad();
      const at::Tensor loss = work_.loss(work_.model.forward(x), y);
      loss.backward();
      adam_.step();
    }
  }

  const train::Model& model() const { return work_.model; }

 private:
  Work work_;
  Loader loader_;
  Ddp ddp_;
  FusedAdamW adam_;
  int64_t epoch_ = 0;
};

// Stops the clock of the Trainer after each epoch, and lets the loop run one.
class Turns : public train::Callback {
 public:
  Turns(const Options& options, const World& world, Loop& beside)
      : options_(options), group_(world.group()), loop_(beside) {}

  void on_step_end(const train::RunState& state, train::Requests&) override {
    if (state.step % options_.steps != 0) return;
    const double trainers = since(begin_);
    group_.barrier().wait();
    const auto begin = Clock::now();
    loop_.run();
    const double loops = since(begin);
    if (state.step > options_.steps) {  // the first turn is for warming up
      trainer.push_back(trainers);
      loop.push_back(loops);
    }
    group_.barrier().wait();
    begin_ = Clock::now();
  }

  std::vector<double> trainer, loop;  // seconds of each turn

 private:
  static double since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  const Options& options_;
  Group group_;
  Loop& loop_;
  Clock::time_point begin_ = Clock::now();
};

void measure(const Options& options) {
  const World world = World::from_env();
  at::set_num_threads(static_cast<int>(options.threads));
  Loop loop(options, world);
  const Work work = work_of(options, world);
  const auto turns = std::make_shared<Turns>(options, world, loop);
  Trainer trainer(world, work.model, work.loss, work.data,
                  {.optimizer = train::adamw({.lr = 1e-3, .weight_decay = 0.01}),
                   .max_steps = options.steps * (options.turns + 1),
                   .loader = {.batch_size = options.batch, .seed = 1, .drop_last = true},
                   .callbacks = {turns}});
  trainer.run();

  const auto ours = work.model.module().parameters(), theirs = loop.model().module().parameters();
  for (size_t i = 0; i < ours.size(); ++i) {
    if (!at::equal(ours[i], theirs[i]))
      throw std::runtime_error("the Trainer and the loop have different parameters");
  }
  const auto rates = [&](const std::vector<double>& seconds) {
    std::vector<double> out;
    for (const double s : seconds)
      out.push_back(static_cast<double>(options.steps * options.batch * world.size()) / s);
    return out;
  };
  if (!world.is_main()) return;
  const nlohmann::json line = {
      {"model", options.model},
      {"world", world.size()},
      {"samples_per_s", {{"trainer", rates(turns->trainer)}, {"loop", rates(turns->loop)}}}};
  std::puts(line.dump().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times a Trainer beside a loop by hand");
  Options options;
  app.add_option("--model", options.model)
      ->check(CLI::IsMember({"gpt", "mlp"}))
      ->capture_default_str();
  for (const auto& [flag, value, text] :
       {std::tuple("--steps", &options.steps, "of each epoch"),
        std::tuple("--turns", &options.turns, "epochs of both, after one for warming up"),
        std::tuple("--batch", &options.batch, "per rank"),
        std::tuple("--threads", &options.threads, "per rank")}) {
    app.add_option(flag, *value, text)->check(CLI::Range(1, 1'000'000))->capture_default_str();
  }
  CLI11_PARSE(app, argc, argv);
  try {
    measure(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
