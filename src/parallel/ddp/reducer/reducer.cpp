#include "parallel/ddp/reducer/reducer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "comm/transport.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "parallel/ddp/consistency/compare_ranks.h"
#include "parallel/ddp/consistency/fingerprint.h"
#include "parallel/ddp/gradients.h"
#include "parallel/lanes/rules.h"

namespace lockstep::parallel {
namespace {

constexpr std::string_view kAdvice =
    "or a rank skipped a batch or left the loop: see Join, any_rank; "
    "or ranks use different models: give all of them one Ddp";

constexpr std::string_view kJoinAdvice =
    "or a rank ran another number of backward(), or in another order than the Join's list: "
    "within a Join each Ddp has one in a step";

// Gradients arrive roughly in the reverse of the order in which layers were registered.
std::vector<size_t> reverse_registration(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.rbegin(), order.rend(), size_t{0});
  return order;
}

}  // namespace

Reducer::Reducer(const Group& group, std::vector<Named> dense, const std::vector<Named>& sparse,
                 const DdpOptions& options, AttachedModule& module, BufferSync& buffers,
                 std::shared_ptr<const int> holds, std::shared_ptr<const LanePlan> plan)
    : group_(group),
      parameters_(std::move(dense)),
      dense_(parameters_.size()),
      options_(options),
      module_(module),
      flag_counts_{.parameters = dense_ + sparse.size(),
                   .lacking = options.unused == Unused::Error ? dense_ + sparse.size() : 0,
                   .ranks = static_cast<size_t>(group.size()),
                   .buffers = options.buffers == Buffers::None ? 0 : buffers.size()},
      buckets_(group, parameters_,
               assign_buckets(parameters_, reverse_registration(dense_), options.bucket_bytes),
               flag_counts_.all()),
      sparse_(group, sparse),
      buffers_(buffers),
      holds_(std::move(holds)),
      plan_(std::move(plan)),
      caller_(group.next_caller()),
      queue_(PassQueue::of(group)),
      join_(group, dense_ + sparse.size()),
      schedule_(dense_ + sparse.size()) {
  parameters_.insert(parameters_.end(), sparse.begin(), sparse.end());
  std::unordered_set<const void*> in_buckets;
  for (size_t i = 0; i < dense_; ++i)
    in_buckets.insert(parameters_[i].tensor.unsafeGetTensorImpl());
  std::ranges::copy_if(module.model().parameters, std::back_inserter(frozen_),
                       [](const Named& item) { return !item.tensor.requires_grad(); });
  others_ = module.module().tensors();
  std::erase_if(others_, [&](const at::Tensor& tensor) {
    return in_buckets.contains(tensor.unsafeGetTensorImpl());
  });
  held_.resize(parameters_.size());
  flags_ = UsageFlags(buckets_.flags(), flag_counts_);
  if (plan_) {
    lanes_ = std::make_unique<LaneGradients>(plan_, parameters_.size(), dense_);
    make_lane_slots();
  }
  const auto every = env_int("LOCKSTEP_FINGERPRINT", 0, 1'000'000'000);
  if (group_.rank() == 0) fingerprint_every_ = static_cast<uint32_t>(every.value_or(0));
  queue_->add(*this);
}

at::Tensor Reducer::arriving(size_t parameter, const at::Tensor& gradient) {
  // A child by fork() has no buckets.
  if (group_.size() > 1) group_.transport().unfinished()->check_process("backward");
  const bool held = *holds_ > 0;
  if (!backward_.is_open()) finish_abandoned();
  if (!held && !backward_.is_open()) begin();
  if (parameter >= parameters_.size()) {
    object(change());
    return gradient;
  }
  const Named& item = parameters_[parameter];
  if (gradient.layout() != at::kStrided && !is_sparse(parameter)) {
    object(fmt::format(
        "the gradient of parameter '{}' is sparse, which Ddp has to know: name the parameter in "
        "DdpOptions::sparse, or build the layer with sparse = false",
        item.name));
    return gradient;
  }
  if (at::GradMode::is_enabled() && gradient.requires_grad()) warn_of_history();
  note_prior(parameter, /*is_reached=*/true);
  if (held) {
    if (lanes_) object_unless_in_lane(objection_, *plan_, "Ddp");
    held_[parameter] = true;
    join_.end_forward();
  } else if (schedule_.step(parameter) == Step::Absent) {
    schedule_.set(parameter, Step::Arriving);
  } else {
    object(fmt::format(
        "parameter '{}' received a second gradient within one backward(), when its first may be on "
        "its way to the other ranks: checkpoint each layer once, or run this backward() under "
        "hold() and a last one outside",
        item.name));
    return gradient;
  }
  if (lanes_) return arriving_in_lane(parameter, gradient);
  // The autograd node adds the gradient, with create_graph records history, and runs the user's
  // post-accumulate hook (with nothing to add, once or not at all, depending on libtorch's
  // version). arrived() then takes the values.
  if (is_sparse(parameter) || item.tensor.grad().defined() || at::GradMode::is_enabled() ||
      torch::autograd::impl::post_acc_grad_hooks(item.tensor)) {
    return gradient;
  }
  // One pass over the gradient: no memory to clear, nothing to add to.
  if (!fits(gradient, parameter)) return gradient;  // finish() finds the module converted
  if (held) buckets_.make_room(parameter);          // one hold() may last for several backward()
  const at::Tensor& view = buckets_.view(parameter);
  copy_into(view, gradient);
  item.tensor.mutable_grad() = view;
  return {};
}

// A loss of gradients would train without the part that goes through them.
void Reducer::warn_of_history() const {
  static std::atomic_flag is_said;
  if (group_.rank() != 0 || is_said.test_and_set()) return;
  log::warn(
      "[ddp] backward(create_graph = true): the parameters' gradients become averages, which have "
      "no history. For a loss that is computed from them, take torch::autograd::grad()");
}

void Reducer::arrived(size_t parameter) {
  if (!backward_.is_open() || parameter >= parameters_.size()) return;
  const bool is_placed = schedule_.step(parameter) == Step::Placed;
  if (!is_placed && schedule_.step(parameter) != Step::Arriving) return;
  const at::Tensor& tensor = parameters_[parameter].tensor;
  // A post-accumulate hook that took the gradient away leaves a parameter unreached.
  if (!is_placed && !tensor.grad().defined()) {
    schedule_.set(parameter, Step::Absent);
    return;
  }
  if (is_sparse(parameter)) {
    if (!tensor.grad().is_sparse()) {
      object(
          fmt::format("the gradient of parameter '{}' is dense, but it belongs to a layer with "
                      "sparse = true or "
                      "is named in DdpOptions::sparse: a table that is also used elsewhere needs "
                      "sparse = false",
                      parameters_[parameter].name));
    }
    if (lanes_) take_in_lane(parameter);
    schedule_.complete(parameter, std::nullopt);
  } else {
    if (is_placed) {
      // Its bucket has it.
    } else if (lanes_) {
      take_in_lane(parameter);
    } else if (fits(tensor.grad(), parameter)) {
      buckets_.adopt(tensor, parameter);
    } else {
      object_to_gradient(parameter);
    }
    schedule_.complete(parameter, buckets_.bucket_of(parameter));
  }
  if (!is_last_lane() || !schedule_.is_due()) return drive();
  queue_->launch(*this);
}

// Collectives that a backward() left in flight when it threw still write to the buckets. What a
// hook throws for them is of that backward().
void Reducer::finish_abandoned() {
  for (auto& work : works_) {
    try {
      std::exchange(work, {}).wait();
    } catch (const CommError&) {
      throw;
    } catch (...) {
    }
  }
  works_.clear();
}

// What is in flight would overwrite the zeros of an optimizer's zero_grad(), so gradients leave the
// buckets.
void Reducer::abandon() {
  queue_->abandon(*this);
  for (size_t i = 0; i < dense_ && !works_.empty(); ++i) {
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    if (gradient.defined() && gradient.is_alias_of(buckets_.view(i))) gradient = at::Tensor();
  }
}

void Reducer::begin() {
  finish_abandoned();
  make_room();
  completed_ = 0;
  unreached_.clear();
  schedule_.begin(buckets_.assignment());
  while (tags_.size() < buckets_.size()) tags_.push_back(fmt::format("bucket {}", tags_.size()));
  clock_.begin(buckets_.size());
  quiet_ = options_.hook && !options_.hook->communicates();
  if (quiet_ && join_.is_joined()) {
    throw ConfigError(fmt::format(
        "[join] the hook {} does not communicate in every pass, so ranks cannot join others' steps",
        options_.hook->name()));
  }
  if (lanes_) begin_lane();
  if (!quiet_ && is_last_lane()) ++pass_;
  if (is_last_lane()) skipped_ = 0;
  if (is_last_lane()) zeroed_in_a_pass_ = std::max(zeroed_in_a_pass_, std::exchange(zeroed_, 0));
  if (shadows_) return;
  backward_.begin(weak_from_this(), &Reducer::finish, &Reducer::abandon);
  if (is_last_lane()) queue_->begin(*this);
}

comm::CallOptions Reducer::call(std::string_view label) const {
  return {.label = label,
          .context = {.name = "Ddp", .number = caller_, .pass = pass_},
          .advice = join_.is_joined() ? kJoinAdvice : kAdvice};
}

void Reducer::launch_next() {
  const size_t bucket = schedule_.take();
  const bool last = bucket + 1 == buckets_.size();
  const at::Tensor& flat = buckets_.flat(bucket);
  if (last) write_flags();
  clock_.started(bucket, static_cast<int64_t>(flat.nbytes()));
  if (options_.hook) {
    const at::NoGradGuard no_grad;
    works_.push_back(options_.hook->start(group_, buckets_.bucket(bucket)));
    const Group over = averaged_over();
    if (last && over.size() > 1)
      works_.push_back(over.all_reduce(flags_.elements(), ReduceOp::Sum, call("flags")));
  } else if (lanes_) {
    works_.push_back(lanes_->average(buckets_, bucket, call(tags_[bucket])));
  } else {
    const ReduceOp op = join_.divides_by_present() ? ReduceOp::Sum : ReduceOp::Average;
    works_.push_back(group_.all_reduce(flat, op, call(tags_[bucket])));
  }
}

// A transport without a thread of its own progresses only in calls.
void Reducer::drive() {
  for (; completed_ < works_.size() && works_[completed_].is_completed(); ++completed_) {
    clock_.over(completed_);
  }
}

void Reducer::wait_for_works() {
  for (size_t i = 0; i < works_.size(); ++i) {
    std::exchange(works_[i], {}).wait();
    if (i >= completed_) clock_.over(i);
  }
  works_.clear();
}

void Reducer::finish() {
  const bool is_last = is_last_lane();
  if (is_last && !shadows_) return PassQueue::end(queue_);
  launch_all_but_last();
  if (is_last) finish_pass();
}

void Reducer::launch_all_but_last() {
  const at::NoGradGuard no_grad;
  clock_.last_gradient();
  if (auto text = change(); !text.empty()) object(std::move(text));
  const bool is_last = is_last_lane();
  if (lanes_) {
    complete_lane();
  } else if (!schedule_.all_complete()) {
    contribute_unreached();
  }
  while (is_last && !schedule_.has_only_last()) launch_next();
}

void Reducer::finish_pass() {
  const at::NoGradGuard no_grad;
  while (schedule_.has_next()) launch_next();
  refuse_objected();
  if (join_.is_joined()) {
    wait_for_works();
    find_present();
  }
  finish_buffers();
  if (!sparse_.empty()) lanes_ ? average_sparse_lanes() : average_sparse();
  if (options_.unused == Unused::Error) refuse_unreached();
  object_to_frozen();
  if (lanes_) settle_lanes();
  settle_unreached();
  note_accumulation();
  if (!rebuilt_ && !quiet_) rebuild();
  std::fill(held_.begin(), held_.end(), false);
  clock_.end();
  join_.end_forward();
  if (!shadows_) join_.refuse_uneven(clock_.count());
  check_same();
  if (fingerprint_every_ > 0 && !quiet_ && pass_ % fingerprint_every_ == 0) {
    log::info(fmt::format("[ddp] Ddp {}, pass {}: parameters and buffers {:016x}", caller_, pass_,
                          fingerprint(module_.model().tensors())));
  }
}

// The parameters are those that the forward used. Those of the first pass are compared in any case:
// a forward may have given them values of its own batch. So is the order of samples, and another
// one when it comes.
void Reducer::check_same() {
  if (quiet_ || shadows_ || !join_.all_in_backward()) return;
  const bool is_first = !std::exchange(compared_, true), is_asked = options_.check_same_every > 0;
  const bool is_due = is_asked ? ++unchecked_ >= options_.check_same_every : is_first;
  if (!is_due && !is_first && !has_new_order()) return;
  flags_.clear_new_order();
  const std::string when = fmt::format("pass {} of Ddp {}", clock_.count(), caller_);
  if (!is_due) return compare_orders(group_, when, orders_.take());
  unchecked_ = 0;
  Model model = module_.model();
  if (!is_asked || options_.buffers == Buffers::None) model.buffers.clear();
  compare_ranks(model, optimizer_, group_, when, orders_.take());
}

// Some rank has, so that the answer is the same on all. On a device the flags cannot be read
// without waiting for it.
bool Reducer::has_new_order() const {
  return flags_.elements().is_cpu() ? flags_.has_new_order() : reads_flags();
}

// The flags say which buffers some rank changed.
void Reducer::finish_buffers() {
  wait_for_works();
  if (flag_counts_.buffers == 0 || quiet_) return;
  if (lanes_ && flags_.has_prior()) buffers_.check_start("ddp");
  auto shares = flags_.changed();
  if (options_.hook || join_.divides_by_present()) {  // sums
    for (double& share : shares) share /= group_.size();
  }
  if (lanes_) return buffers_.finish_lanes(shares);
  if (std::ranges::none_of(shares, [](double share) { return share > 0; })) return;
  if (!join_.is_joined()) buffers_.warn_of_own_changes(shares);
  buffers_.start(join_.present());
  buffers_.finish(shares);
}

Group Reducer::averaged_over() const {
  return quiet_ ? options_.hook->subgroup().value_or(Group()) : group_;
}

void Reducer::average_sparse() {
  const auto first_sparse = static_cast<std::ptrdiff_t>(dense_);
  const auto all = reached();
  const std::vector<char> mine(all.begin() + first_sparse, all.end());
  if (!quiet_) {
    sparse_.average(mine, join_.divides_by_present() ? join_.count_present() : group_.size());
    return;
  }
  const Group over = averaged_over();
  if (over.size() == 1) return;
  SparseGradients(over, {parameters_.begin() + first_sparse, parameters_.end()})
      .average(mine, over.size());
}

void Reducer::write_flags() {
  const at::NoGradGuard no_grad;
  const auto mine = presence();
  if (mine == UsageFlags::Presence::Absent) flags_.write_absent();
  if (flag_counts_.buffers > 0) flags_.write_changed(buffers_.find_changed());
  if (mine == UsageFlags::Presence::Absent) {
    // This rank reaches no parameter, and lacks none.
  } else if (schedule_.all_complete() && !lanes_) {
    flags_.write_all_reached();
  } else {
    flags_.write(reached(), lacking());
  }
  if (join_.is_joined()) flags_.write_presence(group_.rank(), mine);
  if (lanes_) flags_.clear_prior();
  if (has_prior() || buffers_.is_start_changed()) flags_.write_prior();
  if (orders_.any()) flags_.write_new_order();
  if (!accumulates_ && !quiet_ && reads_flags() && any_held()) flags_.write_held();
  if (objection_.is_raised() && !quiet_) flags_.write_objection();
}

void Reducer::write(DdpLog& log) const {
  log.rebuilt = rebuilt_;
  log.bucket_bytes.clear();
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    log.bucket_bytes.push_back(static_cast<int64_t>(buckets_.bucket(bucket).flat.nbytes()));
  }
  for (const size_t i : schedule_.order()) log.order.push_back(parameters_[i].name);
  clock_.write(log);
  if (log.pass_count == 0) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!schedule_.is_complete(i)) log.unused.push_back(parameters_[i].name);
  }
}

void Reducer::rebuild() {
  rebuilt_ = true;
  if (group_.size() == 1) return;
  std::vector<size_t> order;
  std::ranges::copy_if(schedule_.order(), std::back_inserter(order),
                       [&](size_t i) { return !is_sparse(i); });
  for (const auto& members : buckets_.assignment()) {
    for (size_t i : members) {
      if (!schedule_.is_complete(i)) order.push_back(i);
    }
  }
  const std::string bytes = group_.broadcast_bytes(
      {reinterpret_cast<const char*>(order.data()), order.size() * sizeof(size_t)}, 0,
      call("order of gradients"));
  std::memcpy(order.data(), bytes.data(), bytes.size());
  auto assignment = assign_buckets(parameters_, order, options_.bucket_bytes);
  if (order.empty() || assignment == buckets_.assignment()) return;

  const std::vector<Named> dense(parameters_.begin(),
                                 parameters_.begin() + static_cast<std::ptrdiff_t>(dense_));
  Buckets fresh(group_, dense, std::move(assignment), flags_.elements().numel());
  for (size_t i = 0; i < dense_; ++i) {
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    if (gradient.defined() && buckets_.holds(gradient, i)) fresh.adopt(parameters_[i].tensor, i);
  }
  buckets_ = std::move(fresh);
  flags_ = UsageFlags(buckets_.flags(), flag_counts_);
  if (lanes_) make_lane_slots();
}

}  // namespace lockstep::parallel
