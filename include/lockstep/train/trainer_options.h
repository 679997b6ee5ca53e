// The options of a Trainer.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/directory.h"
#include "lockstep/core/preemption.h"
#include "lockstep/data/loader.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/grad_scaler.h"
#include "lockstep/parallel/lr_scheduler.h"
#include "lockstep/parallel/weight_average.h"
#include "lockstep/train/callback.h"
#include "lockstep/train/data_source.h"
#include "lockstep/train/metric.h"
#include "lockstep/train/model.h"
#include "lockstep/train/optimizer.h"
#include "lockstep/train/schedule.h"

namespace lockstep::train {

using parallel::Better;

// The dtype of matrix products and convolutions; weights and sums are of the parameters' dtype.
enum class Precision {
  Full,  // as the model has them
  BFloat16,
  Float16,  // with a GradScaler
};

// What happens when the loss of any rank, or the norm of the gradients where it is taken, is not
// finite. (With float16 an overflow of the gradients is the scaler's to skip.)
enum class NonFinite {
  Error,  // the training ends on all ranks, with the step and the ranks' losses
  Skip,   // the step makes no update, buffers are as before it, and RunState::skipped counts it
};

// A part of a run with data of its own, as a curriculum has them.
struct Stage {
  std::string name;
  DataSource data = {};
  int64_t epochs = 0;  // one of the two
  int64_t steps = 0;
  int64_t batch_size = 0;  // 0: the loader's
};

// When and how the model is evaluated: in eval(), without gradients, each sample exactly once on
// any number of ranks.
struct Evaluation {
  DataSource data = {};
  int64_t every_epochs = 1;  // 0: not by epochs. At the end of the run in any case
  int64_t every_steps = 0;   // 0: not by steps
  int64_t batch_size = 0;    // per rank; 0: the loader's
  // Transforms of its samples, on their way to the model. Those of TrainerOptions::loader are the
  // training's, with its augmentation, and evaluations do not have them: where there are any, say
  // here which evaluations have, such as scaling; {} for none. Without a value: none, with a
  // warning.
  std::optional<std::vector<data::Transform>> transforms = std::nullopt;
  // Beside the loss: of the model's outputs and the targets. They may be the same objects as those
  // of other Trainers, one after another. Two values of one name that differ, as of a metric called
  // "loss", are a ConfigError.
  std::vector<std::shared_ptr<Metric>> metrics = {};
  // Means over a batch's samples (TrainerOptions::count: over what that counts), by name, the same
  // names in every batch (ConfigError for others). When not given: "loss", from the model and the
  // loss of the training, and `metrics` are updated, too. A function that is given updates
  // `metrics` itself. With fsdp it is also called with samples that do not count.
  std::function<std::map<std::string, double>(const data::Batch&)> measure = nullptr;
};

// Ends the run when a metric has not become better.
struct EarlyStopping {
  std::string metric = "loss";
  Better better = Better::Lower;
  int64_t patience = 3;  // evaluations without a better one that are tolerated
  double min_delta = 0;  // by which a metric has to be better to count
};

// Which checkpoint is kept regardless of its age.
struct Best {
  std::string metric = "loss";
  Better better = Better::Lower;
  // After the run the models are those of the best checkpoint.
  bool restore_at_end = false;
};

// From where a run starts. A job that its launcher has started again resumes from what it has saved
// itself, if anything, with either value.
enum class Resume {
  Latest,  // the newest checkpoint of the directory, where there is one
  Never,   // refused when the directory has checkpoints
};

// What is saved, and when.
struct Saving {
  // Empty: nothing is saved. A relative one, as that of resume_from, is of the working directory in
  // which the Trainer was made.
  std::string directory = {};
  int64_t every_steps = 0;
  int64_t every_epochs = 0;
  bool at_end = true;     // of the run, and when it is stopped before
  int64_t keep_last = 0;  // 0: all
  // Tensors that Trainer::track() was given of which each rank has its own (a queue of keys, a pool
  // of images, a replay buffer), as CheckpointerOptions::each_rank names them. Not those of the
  // Trainer: its models and optimizers are the same on all ranks.
  std::vector<std::string> each_rank = {};
  std::optional<Best> best = std::nullopt;  // saved whenever an evaluation finds a better one
  bool async = true;                        // written in the background
  Resume resume = Resume::Latest;
  // A checkpoint's folder, in place of `resume`. One of another directory is refused when
  // `directory` has checkpoints of another run.
  std::string resume_from = {};
  // A signal to stop saves, and ends the run (PreemptionNotice); false: it does what it does in the
  // program.
  bool on_preemption = true;
};

// The same on all ranks; the constructor compares them.
struct TrainerOptions {
  MakeOptimizer optimizer = adamw();
  LearningRate learning_rate = constant();
  // What the optimizer's rate is multiplied by: the number of ranks (with lanes, of lanes), its
  // root, or nothing.
  parallel::LrScaling lr_scaling = parallel::LrScaling::None;
  // Parameter groups with options of their own; all parameters with the optimizer's when not given.
  // An option that equals the default of its class (as weight_decay(0) of AdamOptions, and
  // weight_decay(0.01) of AdamWOptions) is for libtorch one that was not given, and becomes the
  // optimizer's: for groups without decay under Adam, make the optimizer without it, and give the
  // decay to the others.
  std::function<std::vector<torch::optim::OptimizerParamGroup>(torch::nn::Module&)> groups =
      nullptr;

  // How long the run is: until the first of these is reached, of which one has to be given. With
  // stages: theirs.
  int64_t epochs = 0;
  int64_t max_steps = 0;
  // The longest time of this process, counted from run() on. The run ends as if its last step were
  // made.
  std::chrono::milliseconds max_time{0};

  // Batch size, seed, order, transforms (Evaluation has its own), threads, lanes. `exact` is for
  // evaluations; `device` is the world's when it is not given.
  data::LoaderOptions loader = {};
  // Further stages instead of the Trainer's data, one after another.
  std::vector<Stage> stages = {};
  // Micro-batches of a step, of each rank or lane. The gradient is that of the mean over all
  // samples of the step, also where micro-batches differ in size, as at the end of an epoch, which
  // may have fewer.
  int64_t accumulation = 1;
  // Number of items that a batch's loss is the mean of, when not its samples: tokens without
  // padding. Ranks may then differ; one all_reduce of one number a step. A batch may count 0: its
  // loss (of cross_entropy the mean of nothing, NaN) is not looked at, and its gradients have to be
  // 0 or finite, as cross_entropy's are. A step in which nothing counts makes no update. It is
  // called several times for a batch.
  std::function<int64_t(const data::Batch&)> count = nullptr;

  double max_grad_norm = 0;  // 0: gradients are not clipped
  Precision precision = Precision::Full;
  parallel::GradScalerOptions scaler = {};  // with Precision::Float16
  NonFinite non_finite = NonFinite::Error;
  // BatchNorm layers become SyncBatchNorm over groups of this many neighbouring ranks; 0: all
  // ranks.
  std::optional<int64_t> sync_batch_norm = std::nullopt;
  bool zero = false;  // a ZeroOptimizer
  // Buckets, hook, unused parameters. The lanes are the loader's.
  parallel::DdpOptions ddp = {};
  // An Fsdp in place of Ddp: parameters, gradients and the optimizer's state are sharded. What
  // calls the model calls it, and the layers that are units, by lockstep::call(), as Model does.
  // Micro-batches accumulate whole gradients on each rank (Fsdp::hold()). The lanes are the
  // loader's. After the run the model's parameters have memory within calls only:
  // Trainer::fsdp()->unshard() gives it.
  std::optional<parallel::FsdpOptions> fsdp = std::nullopt;

  // Averages parameters and buffers after each step. Evaluations, with what depends on them
  // (metrics, early stopping, the best checkpoint), and on_evaluate() see the averages;
  // Trainer::average() has them. Checkpoints have both.
  std::optional<parallel::WeightAverageOptions> weight_average = std::nullopt;

  Evaluation evaluation = {};
  std::optional<EarlyStopping> early_stopping = std::nullopt;
  Saving saving = {};
  // When it has been received on any rank, the run saves and ends. To notice signals from the
  // program's start on, make one before the World. When not given, run() makes one where there is a
  // directory to save to, unless Saving::on_preemption is false.
  const PreemptionNotice* notice = nullptr;
  std::vector<std::shared_ptr<Callback>> callbacks = {};
};

}  // namespace lockstep::train
