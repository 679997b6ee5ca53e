// A step: what every training loop consists of.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <array>
#include <bit>
#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/parallel/autocast.h"
#include "parallel/ddp/packed.h"
#include "train/training.h"

namespace lockstep::train {
namespace {

// A batch's part of the loss of a step that counts `all`. Of nothing a mean is NaN, whose gradients
// have to be 0 all the same.
at::Tensor part_of_step(const at::Tensor& mean, double count, double all) {
  if (count == 0) return mean.nan_to_num(0, 0, 0) * 0;
  return count == all ? mean : mean / (all / count);
}

// What Ddp or Fsdp refuses, or finds that differs between the ranks, all ranks refuse; others may
// be of a hook of the program's.
bool is_refused_by_all(const std::string& text) {
  return text.starts_with("[ddp]") || text.starts_with("[fsdp]") ||
         text.starts_with("[check_same]");
}

}  // namespace

double Training::update(std::string_view name, const LossOfBatch& loss) {
  TrainedPart& part = this->part(name);
  // The inner one's gradients would be held back, or cleared, by the outer one.
  if (is_updating_) {
    throw ConfigError(fmt::format(
        "[train] update() of part '{}' within the loss of another update(): call it after that",
        name));
  }
  is_updating_ = true;
  struct AtEnd {
    bool& is_updating;
    ~AtEnd() { is_updating = false; }
  } at_end{is_updating_};
  std::vector<parallel::Hold> held;  // the other models' gradients, which their next update clears
  for (auto& other : parts_) {
    if (&other != &part) held.push_back(other.hold());
  }
  part.zero_grad();
  const auto buffers = copies_of_buffers();
  const StepSums mine = micro_->lanes ? backward_of_lanes(part, loss) : backward(part, loss);

  const CommonPart common(*this);  // from here on gradients are the same on all ranks
  StepSums sums = agreed(mine);
  const bool is_empty = options_.count && sums.weight == 0;
  const double mean = is_empty        ? state_.loss
                      : micro_->lanes ? part.lane_mean->mean()
                                      : sums.loss / sums.weight;
  note(sums);
  // Also before a step that is skipped, whose overflow the scaler has to know of.
  if (part.scaler) part.scaler->unscale_(*part.optimizer);
  if (options_.max_grad_norm > 0) {
    state_.gradient_norm = part.clip(options_.max_grad_norm).item<double>();
  }
  bool is_updated = false;
  if (refuses(part, mine, sums)) {
    restore_buffers(buffers);
    // What backward() has left in them is not what the next one begins with. Lanes' buffers are
    // compared at each step's start.
    if (!micro_->lanes) {
      for (auto& each : parts_) each.sync_buffers();
    }
  } else if (!is_empty) {
    try {
      is_updated =
          part.scaler ? part.scaler->step(*part.optimizer) : (part.optimizer->step(), true);
    } catch (...) {
      is_common_ = part.zero != nullptr;  // which tells the others by itself
      throw;
    }
  }
  if (!is_updated) ++state_.skipped;
  state_.learning_rate = part.optimizer->param_groups()[0].options().get_lr();
  if (part.scaler) {
    state_.loss_scale = part.scaler->factor();
    // An overflow that the scaler has found is not a fault of the gradients, unless it persists.
    if (!is_updated && state_.loss_scale > 1 && !std::isfinite(state_.gradient_norm.value_or(0))) {
      state_.gradient_norm.reset();
    }
    part.scaler->update();
  }
  if (is_empty) return mean;
  state_.loss = mean;
  if (parts_.size() > 1) state_.losses[part.name] = mean;
  return mean;
}

// Micro-batches count by their samples, so that the gradient is that of the mean over all of them.
StepSums Training::backward(TrainedPart& part, const LossOfBatch& loss) {
  const auto& batches = micro_->batches;
  StepSums sums;
  for (const auto& batch : batches) {
    sums.samples += static_cast<double>(batch.data.size(0));
    sums.weight += static_cast<double>(count_of(batch));
  }
  double all = sums.weight;  // of the step, on each rank; the same on all, unless they count
  if (options_.count) all = sum_over_ranks(sums.weight) / world_.size();
  std::vector<at::Tensor> values;
  for (size_t i = 0; i < batches.size(); ++i) {
    std::optional<parallel::Hold> hold;
    if (i + 1 < batches.size()) hold.emplace(part.hold());
    const auto count = static_cast<double>(count_of(batches[i]));
    const at::Tensor value = loss_of(batches[i], loss);
    backward_of(part, part_of_step(value, count, all));
    values.push_back(value.detach());
  }
  for (size_t i = 0; i < batches.size(); ++i) {
    const auto count = static_cast<double>(count_of(batches[i]));
    if (count > 0) sums.loss += values[i].item<double>() * count;
  }
  sums.bad = std::isfinite(sums.loss) ? 0 : 1;
  return sums;
}

// The same in each lane.
StepSums Training::backward_of_lanes(TrainedPart& part, const LossOfBatch& loss) {
  const data::Step& step = *micro_->lanes;
  StepSums sums;
  const int64_t first = step.lanes().begin;
  const auto counted = [&](const std::vector<data::Batch>& batches) {
    double count = 0;
    for (const auto& batch : batches) count += static_cast<double>(count_of(batch));
    return count;
  };
  double all = 0;  // of the step, in each lane; the same in all, unless they count
  if (options_.count) {
    for (int64_t lane = first; lane < step.lanes().end; ++lane) {
      sums.weight += counted(micro_->of_lane(lane - first, step.batch(lane)));
    }
    all = sum_over_ranks(sums.weight) / static_cast<double>(step.lane_count());
  }
  int64_t own_lane = 0;
  for (const auto& last : part.lanes(step)) {
    const auto batches = micro_->of_lane(own_lane++, last);
    if (!options_.count) all = counted(batches);
    for (size_t i = 0; i < batches.size(); ++i) {
      std::optional<parallel::Hold> hold;
      if (i + 1 < batches.size()) hold.emplace(part.hold());
      sums.samples += static_cast<double>(batches[i].data.size(0));
      const at::Tensor value = loss_of(batches[i], loss);
      const auto count = static_cast<double>(count_of(batches[i]));
      backward_of(part, part_of_step(value, count, all));
      const double of_batch = count > 0 ? value.item<double>() : 0;
      part.lane_mean->add(of_batch * count, std::llround(count));
      if (!std::isfinite(of_batch)) sums.bad = 1;
      sums.loss += of_batch;  // what an error shows
    }
  }
  return sums;
}

void Training::backward_of(TrainedPart& part, const at::Tensor& loss) {
  try {
    (part.scaler ? part.scaler->scale(loss) : loss).backward();
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    is_common_ = is_refused_by_all(text);
    if (text.find(" was attached: ") == text.npos) throw;
    // Neither can be attached again from here.
    throw ConfigError(text +
                      ". A Trainer attaches once, when it is constructed: make what a callback "
                      "unfreezes later trainable before that, and freeze it in on_epoch_begin() "
                      "(docs/trainer.md)");
  }
}

at::Tensor Training::loss_of(const data::Batch& batch, const LossOfBatch& loss) const {
  at::Tensor value;
  {
    const auto autocast = this->autocast();
    value = loss(batch);
  }
  if (value.defined() && value.numel() == 1) return value;
  throw ConfigError(fmt::format(
      "[train] step {}: the loss has {}, and has to be one number, the mean over the batch",
      state_.step + 1,
      value.defined() ? fmt::format("the shape [{}]", fmt::join(value.sizes(), ", "))
                      : "no value"));
}

std::unique_ptr<parallel::Autocast> Training::autocast() const {
  if (options_.precision == Precision::Full) return nullptr;
  return std::make_unique<parallel::Autocast>(
      world_.device(), options_.precision == Precision::BFloat16 ? at::kBFloat16 : at::kHalf);
}

int64_t Training::count_of(const data::Batch& batch) const {
  if (!options_.count) return batch.data.size(0);
  const int64_t count = options_.count(batch);
  if (count >= 0) return count;
  throw DataError(
      fmt::format("[train] step {}: a batch counts {}: TrainerOptions::count has to be 0 or more",
                  state_.step + 1, count));
}

double Training::sum_over_ranks(double mine) {
  const CommonPart common(*this);
  at::Tensor sum = at::full({1}, mine, at::kDouble);
  world_.group().all_reduce(sum, ReduceOp::Sum, {.label = "train: count"}).wait();
  return sum.item<double>();
}

StepSums Training::flags() const {
  const bool is_late = options_.max_time.count() > 0 && Clock::now() - called_ >= options_.max_time;
  const PreemptionNotice* notice = options_.notice != nullptr ? options_.notice
                                   : own_notice_              ? &*own_notice_
                                                              : nullptr;
  return {.stop = requests_.wants_stop() ? 1.0 : 0.0,
          .save = requests_.wants_save() ? 1.0 : 0.0,
          .evaluate = requests_.wants_evaluation() ? 1.0 : 0.0,
          .preempted = notice != nullptr && notice->received() ? 1.0 : 0.0,
          .late = is_late ? 1.0 : 0.0};
}

// One all_reduce for everything that the ranks have to know of each other in a step.
StepSums Training::agreed(StepSums mine) const {
  const StepSums now = flags();
  mine.stop = now.stop;
  mine.save = now.save;
  mine.evaluate = now.evaluate;
  mine.preempted = now.preempted;
  mine.late = now.late;
  if (world_.size() == 1) return mine;
  using Numbers = std::array<double, sizeof(StepSums) / sizeof(double)>;
  auto numbers = std::bit_cast<Numbers>(mine);
  at::Tensor sums =
      at::from_blob(numbers.data(), {static_cast<int64_t>(numbers.size())}, at::kDouble);
  world_.group().all_reduce(sums, ReduceOp::Sum, {.label = "train: step"}).wait();
  return std::bit_cast<StepSums>(numbers);
}

void Training::note(const StepSums& sums) {
  has_agreed_ = true;
  requests_ = {};
  state_.step_samples = std::llround(sums.samples);
  if (sums.save > 0) save_now_ = true;
  if (sums.evaluate > 0) evaluate_now_ = true;
  if (sums.preempted > 0) end(Ended::Preempted);
  if (sums.stop > 0) {
    owes_stop_ = ended_ == Ended::Preempted;
    end(Ended::Stopped);
  }
  if (sums.late > 0) end(Ended::TimeLimit);
}

// What callbacks have asked for on any rank since the ranks agreed last is asked for on all.
void Training::share_requests() {
  if (options_.callbacks.empty()) return;
  const StepSums sums = agreed({});
  if (sums.stop > 0) requests_.stop();
  if (sums.save > 0) requests_.save();
  if (sums.evaluate > 0) requests_.evaluate();
}

// A step that may be skipped leaves no running statistics behind either: one value that is not
// finite would never leave them.
std::vector<at::Tensor> Training::copies_of_buffers() const {
  std::vector<at::Tensor> copies;
  if (options_.non_finite != NonFinite::Skip) return copies;
  const at::NoGradGuard no_grad;
  for (const auto& part : parts_) {
    for (const auto& buffer : part.model.module().buffers()) {
      copies.push_back(parallel::own_elements(buffer).clone());
    }
  }
  return copies;
}

void Training::restore_buffers(const std::vector<at::Tensor>& copies) {
  const at::NoGradGuard no_grad;
  size_t next = 0;
  for (const auto& part : parts_) {
    for (const auto& buffer : part.model.module().buffers()) {
      parallel::own_elements(buffer).copy_(copies[next++]);
    }
  }
}

// Whether there is to be no update, because something is not finite.
bool Training::refuses(TrainedPart& part, const StepSums& mine, const StepSums& sums) {
  const bool is_bad_norm = options_.max_grad_norm > 0 && !part.scaler &&
                           !std::isfinite(state_.gradient_norm.value_or(0));
  if (sums.bad == 0 && !is_bad_norm) return false;
  if (options_.non_finite == NonFinite::Skip) {
    part.zero_grad();
    return true;
  }
  std::string text;
  if (sums.bad == 0) {
    text = fmt::format("the norm of the gradients is {}", *state_.gradient_norm);
  } else {
    const auto losses = world_.group().all_gather_bytes(mine.bad == 0           ? ""
                                                        : std::isnan(mine.loss) ? "nan"
                                                                                : "infinite",
                                                        {.label = "train: losses"});
    for (size_t rank = 0; rank < losses.size(); ++rank) {
      if (losses[rank].empty()) continue;
      text += fmt::format("{}the loss{} is {} on rank {}", text.empty() ? "" : ", ",
                          parts_.size() > 1 ? " of " + part.name : "", losses[rank], rank);
    }
  }
  throw Error(fmt::format(
      "[train] step {}: {}. Lower the learning rate, look at the data of this step, or skip such "
      "steps (NonFinite::Skip; in a file training.non_finite: skip)",
      state_.step + 1, text));
}

}  // namespace lockstep::train
