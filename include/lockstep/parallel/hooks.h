// Hooks that send less than all_reduce does. Each says what it costs in accuracy. What is sent of a
// gradient, and what is kept of it, depends on that parameter only: how gradients are divided into
// buckets changes no bit. Residuals of error feedback are left as they were by a pass in which any
// rank's gradients were not finite, and follow the loss scale of a GradScaler.
#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/parallel/comm_hook.h"

namespace lockstep::parallel {

// What a hook keeps for each parameter between passes, by name.
using Tensors = std::map<std::string, at::Tensor>;
class HookState;

// Options of CastHook.
struct CastOptions {
  // What rounding took from a gradient is added to the next one.
  bool error_feedback = false;
};

// Sends gradients as another dtype: half the bytes with float16 or bfloat16 (as PyTorch's
// fp16_compress_hook and bf16_compress_hook); float32 for parameters of a narrow one, so that sums
// are rounded once. For float16 each rank divides by the number of ranks first, so that the sum
// does not overflow.
class CastHook : public CommHook {
 public:
  // Throws ConfigError for a dtype that is not of floating point.
  explicit CastHook(at::ScalarType dtype, CastOptions options = {});

  std::string_view name() const override { return name_; }
  comm::Work start(const Group& group, const Bucket& bucket) override;
  void end_pass(const std::vector<std::string>& unused) override;
  void attach(const std::map<std::string, at::Tensor>& parameters) override;
  std::map<std::string, at::Tensor> state() const override;
  void restore(const std::map<std::string, at::Tensor>& state) override;
  void check(const std::map<std::string, at::Tensor>& state) const override;
  void rescale(double factor) override;
  int64_t bytes_sent() const override { return bytes_; }

 private:
  at::ScalarType dtype_;
  CastOptions options_;
  std::string name_;
  std::map<std::pair<size_t, int64_t>, at::Tensor> memory_;  // by bucket and size
  std::shared_ptr<HookState> residuals_;
  int64_t bytes_ = 0;
};

// Options of PowerSgd.
struct PowerSgdOptions {
  int64_t rank = 1;  // of the approximation
  // Passes before it are averaged exactly. One in which no rank had a batch (the last of a Join)
  // does not count.
  int64_t start_iteration = 10;
  bool warm_start = true;  // the next pass starts from this one's factors
  bool error_feedback = true;
  // A gradient is compressed only where that divides its bytes by this at least.
  double least_compression = 2;
  uint64_t seed = 0;  // the same on all ranks
};

// Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
// Optimization", NeurIPS 2019. A gradient is seen as a matrix of its first dimension by the others;
// vectors are averaged exactly. Two collectives a bucket, the second when backward() waits.
class PowerSgd : public CommHook {
 public:
  explicit PowerSgd(PowerSgdOptions options = {});  // throws ConfigError for rank or start below 1

  std::string_view name() const override { return "power_sgd"; }
  comm::Work start(const Group& group, const Bucket& bucket) override;
  void end_pass(const std::vector<std::string>& unused) override;
  void attach(const std::map<std::string, at::Tensor>& parameters) override;
  // "iteration", and by parameter "error/..." and "q/...".
  std::map<std::string, at::Tensor> state() const override;
  bool is_same_on_all(std::string_view name) const override { return name.starts_with("q/"); }
  void restore(const std::map<std::string, at::Tensor>& state) override;
  void check(const std::map<std::string, at::Tensor>& state) const override;
  void rescale(double factor) override;
  int64_t bytes_sent() const override { return bytes_; }

 private:
  struct Factors;
  PowerSgdOptions options_;
  int64_t iteration_ = 0;
  size_t gradients_ = 0;  // of the pass
  std::shared_ptr<HookState> kept_;
  int64_t bytes_ = 0;
};

// Options of TopK.
struct TopKOptions {
  double fraction =
      0.01;  // of each gradient's elements that are sent, the largest ones, at least one
  bool error_feedback = true;
};

// Sends the largest elements and their places (Aji and Heafield, "Sparse Communication for
// Distributed Gradient Descent", EMNLP 2017; error feedback after Stich et al., "Sparsified SGD
// with Memory", NeurIPS 2018). Complex gradients are chosen by their real and imaginary parts one
// by one.
class TopK : public CommHook {
 public:
  explicit TopK(TopKOptions options = {});  // throws ConfigError unless 0 < fraction <= 1

  std::string_view name() const override { return "top_k"; }
  comm::Work start(const Group& group, const Bucket& bucket) override;
  void end_pass(const std::vector<std::string>& unused) override;
  void attach(const std::map<std::string, at::Tensor>& parameters) override;
  std::map<std::string, at::Tensor> state() const override;
  void restore(const std::map<std::string, at::Tensor>& state) override;
  void check(const std::map<std::string, at::Tensor>& state) const override;
  void rescale(double factor) override;
  int64_t bytes_sent() const override { return bytes_; }

 private:
  TopKOptions options_;
  std::shared_ptr<HookState> residuals_;
  int64_t bytes_ = 0;
};

// Options of LocalSgd.
struct LocalSgdOptions {
  // Passes before it are averaged over all ranks; they count as those of PowerSgdOptions.
  int64_t start_iteration = 100;
  // The ranks that average gradients from then on, for example those of one host; with a group of
  // one none are averaged.
  Group subgroup = Group();
};

// Lin, Stich, Patel and Jaggi, "Don't Use Large Mini-Batches, Use Local SGD" (post-local SGD), ICLR
// 2020. Ranks drift apart after the start: average the parameters with an Averager now and then.
// Not with ZeroOptimizer, whose ranks update parts for all of them; it refuses.
class LocalSgd : public CommHook {
 public:
  // Counts passes from 0.
  explicit LocalSgd(LocalSgdOptions options = {}) : options_(std::move(options)) {}

  std::string_view name() const override { return "local_sgd"; }
  comm::Work start(const Group& group, const Bucket& bucket) override;
  void end_pass(const std::vector<std::string>& unused) override;
  bool communicates() const override { return iteration_ < options_.start_iteration; }
  std::optional<Group> subgroup() const override { return options_.subgroup; }
  // "iteration".
  std::map<std::string, at::Tensor> state() const override;
  void restore(const std::map<std::string, at::Tensor>& state) override;
  void check(const std::map<std::string, at::Tensor>& state) const override;
  void rescale(double) override {}
  int64_t bytes_sent() const override { return bytes_; }

 private:
  LocalSgdOptions options_;
  int64_t iteration_ = 0;
  size_t gradients_ = 0;  // of the pass
  int64_t bytes_ = 0;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::CastHook;
using parallel::CastOptions;
using parallel::LocalSgd;
using parallel::LocalSgdOptions;
using parallel::PowerSgd;
using parallel::PowerSgdOptions;
using parallel::TopK;
using parallel::TopKOptions;
}  // namespace lockstep
