// Trains, saves every few steps, and resumes where it was when it is started again:
//   lockstep run --nproc-per-node 2 resume --directory runs/a
// On SIGUSR1 or SIGTERM it saves and leaves with the status that asks for a requeue
// (examples/launch/slurm.sh).
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

#include "program.h"

namespace {

namespace nn = torch::nn;

struct Options {
  std::string directory = "runs/resume";
  int64_t steps = 2000;
  int64_t save_every = 200;
  int64_t batch_size = 64;  // per rank
  double learning_rate = 1e-2;
};

struct NetImpl : nn::Module {
  nn::Linear hidden{nullptr}, output{nullptr};
  nn::Dropout dropout{nullptr};

  NetImpl() {
    hidden = register_module("hidden", nn::Linear(1, 32));
    dropout = register_module("dropout", nn::Dropout(0.1));
    output = register_module("output", nn::Linear(32, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(dropout(torch::tanh(hidden(x)))); }
};
TORCH_MODULE(Net);

// Returns whether all steps were made.
bool train(const lockstep::World& world, const lockstep::PreemptionNotice& notice,
           const Options& options) {
  lockstep::seed_everything(1, world);
  Net net;
  const lockstep::data::SyntheticRegression samples(10'000);
  lockstep::Loader loader(samples, world, {.batch_size = options.batch_size, .seed = 1});
  lockstep::Ddp ddp(net, world);
  torch::optim::Adam adam(net->parameters(), options.learning_rate);
  lockstep::LrScheduler schedule(adam, lockstep::cosine_lr({.steps = options.steps}));

  // Everything that the next step depends on.
  lockstep::Checkpointer checkpoints(world, options.directory,
                                     {.retention = {.keep_last = 3}, .async = true});
  checkpoints.track("net", net);
  checkpoints.track("adam", adam);
  checkpoints.track("schedule", schedule);
  checkpoints.track("loader", loader);
  checkpoints.track_generators();

  const auto found = checkpoints.restore_latest();
  int64_t step = found ? found->step : 0;
  if (world.is_main()) std::printf("%s at step %ld\n", found ? "resumes" : "starts", step);

  double loss = 0;
  bool leaves = false;
  for (int64_t epoch = loader.state().epoch; step < options.steps && !leaves; ++epoch) {
    for (const auto& [x, y] : loader.epoch(epoch)) {
      ddp.zero_grad();
      const auto error = nn::functional::mse_loss(net->forward(x), y);
      error.backward();
      adam.step();
      schedule.step();
      ++step;
      // The signal reaches ranks at different times: all of them leave after the same step.
      leaves = lockstep::any_rank(notice.received(), world);
      const bool ends = leaves || step == options.steps;
      if (ends || step % options.save_every == 0) {
        loss = error.item<double>();
        checkpoints.save(step, {{"loss", lockstep::sum_over_ranks(loss, world) / world.size()}});
      }
      if (ends) break;
    }
  }
  checkpoints.finish();  // what is written in the background is on the disk, or this throws
  if (world.is_main()) {
    std::printf("%s after step %ld, loss %.4f\n", leaves ? "saved and leaves" : "trained", step,
                loss);
  }
  return !leaves;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains with checkpoints, and resumes");
  Options options;
  app.add_option("--directory", options.directory, "of the checkpoints")->capture_default_str();
  app.add_option("--steps", options.steps)->check(example::positive())->capture_default_str();
  app.add_option("--save-every", options.save_every, "every this many steps")
      ->check(example::positive())
      ->capture_default_str();
  example::add_training_options(app, options);

  bool is_done = true;
  const auto body = [&] {
    // From the start on: a signal that comes while ranks meet must not end them.
    const lockstep::PreemptionNotice notice;
    is_done = train(lockstep::World::from_env(), notice, options);
  };
  const int status = example::run(app, argc, argv, body, example::Result::InFiles);
  return status == 0 && !is_done ? lockstep::kRequeueStatus : status;
}
