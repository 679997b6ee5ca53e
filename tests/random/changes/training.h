// A training at work, as a program of the library's users does it.
#pragma once

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/parallel/averager.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/grad_scaler.h"
#include "lockstep/parallel/lr_scheduler.h"
#include "lockstep/parallel/weight_average.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "random/changes/net.h"

namespace lockstep::test::changes {

// Where a training runs.
enum class Where {
  Ranks,
  Lanes,  // a group of one; the bits of all ranks' lanes
};

class Training {
 public:
  // As it is before the phase, but for values.
  Training(const Course& course, Where where, const Group& group, size_t phase);

  // All steps of a phase.
  void run(size_t phase);
  // Further ones, which change nothing that is drawn; each is saved.
  void run_discarded(Checkpointer& checkpoints);
  // Keeps only a few of them.
  std::unique_ptr<Checkpointer> checkpointer(const std::string& folder);
  void restore(const std::string& folder);
  // As a program that ends and begins again with phase `phase`.
  void begin_again(size_t phase);
  // What is to be the same on all ranks, and in one process.
  Named state();

 private:
  bool has_lanes() const { return course_.lanes > 0; }
  bool is_on_ranks() const { return where_ == Where::Ranks; }
  bool is_local() const { return is_on_ranks() && phase_.kind == Kind::Local; }
  std::string optimizer_name(size_t phase, int number) const;

  // What an optimizer steps, by names of parameters.
  Named weights() const;
  // Of each optimizer the groups' weights.
  std::vector<std::vector<Named>> members() const;

  void attach();
  std::shared_ptr<parallel::CommHook> hook() const;
  std::shared_ptr<parallel::CommHook> local_hook() const;
  std::unique_ptr<Optimizer> optimizer_of(std::vector<OptimizerParamGroup> groups);
  void make_optimizers(const std::vector<double>& rates);
  void begin_schedule();
  void begin_average();
  std::unique_ptr<Checkpointer> tracking(const std::string& folder, size_t phase,
                                         const CheckpointerOptions& options);

  // `step`: below 0 for none of the course.
  void run_steps(int begin, int end);
  void run_joined(int begin, int end);
  // Before the parts from `begin` on of a step, and below `end`.
  void change(int step, int begin, int end);
  void follow(bool anew);
  void clear();
  void before(int step);
  void backward(const data::Batch& batch, int step);
  void run_backward(const at::Tensor& x, const at::Tensor& y, bool overflows);
  // `own`: batches of this rank's.
  template <class Range>
  void run_lanes(Range&& own, const data::Step& lanes, int step);
  void clip();
  void after();
  OptimizerParamGroup& group_at(size_t i) {
    return optimizers_[i % optimizers_.size()]->param_groups()[i / optimizers_.size()];
  }
  std::vector<double> rates();

  const Course& course_;
  Where where_;
  Group group_;
  size_t number_;
  Phase phase_;
  Shard part_;
  Net net_;
  data::TensorDataset data_;
  data::Loader loader_;
  parallel::GradScaler scaler_;
  parallel::Averager averager_;
  int shard_ranks_ = 0;
  at::Tensor seen_of_ranks_;  // at the phase's end
  std::vector<std::shared_ptr<torch::nn::Module>> models_;
  // Of each model's Ddp.
  std::vector<std::shared_ptr<parallel::CommHook>> hooks_;
  std::vector<std::unique_ptr<parallel::Ddp>> ddps_;
  std::unique_ptr<parallel::Fsdp> fsdp_;
  std::vector<std::unique_ptr<Optimizer>> optimizers_;
  std::vector<parallel::ZeroOptimizer*> zeros_;  // the optimizers, if they are such
  std::vector<std::unique_ptr<parallel::LrScheduler>> schedulers_;
  std::unique_ptr<parallel::WeightAverage> average_;
  Groups groups_;
  bool overflows_ = false;
};

}  // namespace lockstep::test::changes
