// A training as one object: the loop, and everything around it.
//
//   nn::Sequential net(nn::Linear(784, 256), nn::ReLU(), nn::Linear(256, 10));
//   Trainer trainer(world, net, cross_entropy(), images,
//                   {.optimizer = adam({.lr = 1e-3}),
//                    .epochs = 2,
//                    .loader = {.batch_size = 64, .seed = 1},
//                    .evaluation = {.data = test_images},
//                    .saving = {.directory = "runs/mnist"}});
//   const Outcome outcome = trainer.run();
//
// docs/trainer.md is the guide. What it does is what a program would write with the parts of this
// library, with the same bits (src/train/step.cpp is the step).
#pragma once

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/comm/world.h"
#include "lockstep/train/callback.h"
#include "lockstep/train/data_source.h"
#include "lockstep/train/loss.h"
#include "lockstep/train/model.h"
#include "lockstep/train/trainer_options.h"

namespace lockstep::train {

class Training;
using checkpoint::stateful;  // beside that of metrics

// The mean loss over a batch, of one element.
using LossOfBatch = std::function<at::Tensor(const data::Batch& batch)>;

// A model of several, with an optimizer of its own.
struct Part {
  std::string name;
  Model model;
  MakeOptimizer optimizer = nullptr;                         // the options' when not given
  std::optional<LearningRate> learning_rate = std::nullopt;  // the options' when not given
};

// What a step function is given: the step's data, and update().
class Step {
 public:
  // One update of the part of that name: clears its gradients, runs `loss` over the step's
  // micro-batches (or lanes), with gradients averaged over the ranks, and makes the optimizer's
  // step. The other parts' gradients that `loss` computes on the way are dropped. May be called
  // several times a step, in the same order on all ranks, and not within a `loss`. Returns the mean
  // loss over all ranks' samples.
  double update(std::string_view part, const LossOfBatch& loss);

  // Where the training stands: steps are counted from 0 here.
  const RunState& state() const;

 private:
  friend class Training;
  explicit Step(Training& training) : training_(training) {}
  Training& training_;
};

// A step of several models, as of a GAN:
//
//   [&](Step& step) {
//     step.update("discriminator", [&](const Batch& b) { ... });
//     step.update("generator", [&](const Batch& b) { ... });
//   }
using StepFunction = std::function<void(Step&)>;

// Why a run has ended.
enum class Ended {
  Finished,   // all epochs or steps were made
  Stopped,    // a callback asked for it
  Early,      // the metric has not become better
  TimeLimit,  // max_time
  Preempted,  // a signal; saved, where there is a directory
};

// "finished", "stopped", "early stopping", "time limit", "preempted".
std::string_view name_of(Ended ended);

// How a run has ended.
struct Outcome {
  Ended ended = Ended::Finished;
  RunState state = {};    // of the last step
  std::string best = {};  // the folder of the best checkpoint, where one is kept
  // For main() to return: 0, and kRequeueStatus when it was preempted.
  int exit_status() const;
};

// Every rank constructs it with the same models and options, and calls run() once. Everything that
// the training depends on is saved and restored: models, optimizers, schedules, scalers, the place
// in the data, hooks, generators, counters. A run that was stopped anywhere and started again ends
// with the same bits; with lanes on any number of ranks (docs/resuming.md).
//
// An error of one rank alone (data that cannot be read, an exception of the loss) ends the training
// on all: that rank throws it, and the others a CommError which quotes it; of evaluate() an Error.
class Trainer {
 public:
  // Puts the model onto the world's device, makes Ddp or Fsdp, optimizer and loaders of it. Throws
  // ConfigError on all ranks for options that contradict each other or differ between ranks, and
  // for a model that Ddp or Fsdp refuses. What functions of the options throw on one rank, as they
  // make the optimizer, its groups or the schedule, is an error that quotes it on the others, a
  // ConfigError where that is one.
  Trainer(const comm::World& world, const Model& model, Loss loss, DataSource data,
          TrainerOptions options);
  // As above, with a loss that calls the model itself: of outputs that are not a tensor, or of a
  // batch of which the model takes more than the data.
  Trainer(const comm::World& world, const Model& model, LossOfBatch loss, DataSource data,
          TrainerOptions options);
  // Several models. An evaluation needs Evaluation::measure.
  Trainer(const comm::World& world, std::vector<Part> parts, StepFunction step, DataSource data,
          TrainerOptions options);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Something else that is to be saved with the training, before run() (ConfigError after it); as
  // Checkpointer::track().
  template <class T>
  requires requires(T& any) { stateful(any); }
  void track(const std::string& name, T& object) { track(name, stateful(object)); }
  // As above, for what describes itself.
  void track(const std::string& name, std::shared_ptr<checkpoint::Stateful> object);
  // As above, for a module that is not kept: a target network, a teacher.
  template <class Contained>
  void track(const std::string& name, torch::nn::ModuleHolder<Contained>& holder) {
    track(name, checkpoint::stateful_module(name, holder.is_empty() ? nullptr : holder.ptr()));
  }
  // As above, for one without a holder.
  template <std::derived_from<torch::nn::Module> M>
  void track(const std::string& name, const std::shared_ptr<M>& module) {
    track(name, checkpoint::stateful_module(name, module));
  }
  // A generator of the program's own; libtorch's default ones are saved in any case.
  void track(const std::string& name, const at::Generator& generator);

  // Restores, where there is something to restore, and trains until the end. Every rank calls it
  // once, and ends for the same reason at the same step. Modules stay in train() or eval() as they
  // are; rank 0 warns of a model that is in eval() as a whole. Throws what the training throws;
  // ConfigError when called again.
  Outcome run();

  // Evaluates the model now (its averaged weights, where they are averaged) and returns the metrics
  // by name, as means over all samples of Evaluation::data, each counted once. Every rank calls it.
  std::map<std::string, double> evaluate();

  // Where the training stands.
  const RunState& state() const;
  // The Ddp of the part of that name (the only one's is "model"), to look at.
  // Throws ConfigError where the part has an Fsdp.
  const parallel::Ddp& ddp(std::string_view part = "model") const;
  // Null where the part has a Ddp.
  parallel::Fsdp* fsdp(std::string_view part = "model") const;
  // Null without TrainerOptions::weight_average. To save or use the averaged weights after run():
  //   const auto applied = trainer.average()->apply();
  parallel::WeightAverage* average(std::string_view part = "model") const;
  // Its learning rates are the schedule's to set: run() throws ConfigError for others, unless the
  // rate follows a metric (on_plateau()).
  torch::optim::Optimizer& optimizer(std::string_view part = "model") const;

 private:
  std::unique_ptr<Training> training_;
};

}  // namespace lockstep::train

namespace lockstep {
using train::Trainer;
using train::TrainerOptions;
}  // namespace lockstep
