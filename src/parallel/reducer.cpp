#include "parallel/reducer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::parallel {
namespace {

// Gradients arrive roughly in the reverse of the order in which layers were registered.
std::vector<size_t> reverse_registration(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.rbegin(), order.rend(), size_t{0});
  return order;
}

}  // namespace

struct Reducer::Pass {
  std::weak_ptr<Reducer> reducer;

  ~Pass() {
    const auto owner = reducer.lock();
    if (owner && owner->pass_ == this) owner->pass_ = nullptr;
  }
};

Reducer::Reducer(const Group& group, std::vector<Named> dense, const std::vector<Named>& sparse,
                 const DdpOptions& options, BufferSync& buffers, std::shared_ptr<const int> holds)
    : group_(group),
      parameters_(std::move(dense)),
      dense_(parameters_.size()),
      options_(options),
      flag_counts_{.parameters = dense_ + sparse.size(),
                   .ranks = static_cast<size_t>(group.size()),
                   .buffers = options.buffers == Buffers::None ? 0 : buffers.size()},
      buckets_(group, parameters_,
               assign_buckets(parameters_, reverse_registration(dense_), options.bucket_bytes),
               flag_counts_.all()),
      sparse_(group, sparse),
      buffers_(buffers),
      holds_(std::move(holds)) {
  parameters_.insert(parameters_.end(), sparse.begin(), sparse.end());
  held_.resize(parameters_.size());
  steps_.resize(parameters_.size());
  flags_ = Flags(buckets_.flags(), flag_counts_, options.unused);
  present_ = all_ranks(group_);
}

at::Tensor Reducer::arriving(size_t parameter, const at::Tensor& gradient) {
  const Named& item = parameters_[parameter];
  if (gradient.layout() != at::kStrided && !is_sparse(parameter)) {
    throw ConfigError(
        fmt::format("[ddp] the gradient of parameter '{}' on rank {} is sparse, which Ddp has to "
                    "know: name the "
                    "parameter in DdpOptions::sparse, or build the layer with sparse = false",
                    item.name, group_.rank()));
  }
  if (*holds_ == 0) {
    if (pass_ == nullptr) begin();
    if (steps_[parameter] != Step::Absent) {
      throw ConfigError(fmt::format(
          "[ddp] parameter '{}' on rank {} received a second gradient within one backward(), when "
          "its first may be on its way to the other ranks: checkpoint each layer once, or run this "
          "backward() under hold() and a last one outside",
          item.name, group_.rank()));
    }
    steps_[parameter] = Step::Arriving;
  } else {
    held_[parameter] = true;
  }
  // The node adds, with create_graph it records history, and it runs the user's post-accumulate
  // hook (once or not at all, as the libtorch is, when given nothing to add). arrived() then takes
  // the values.
  if (is_alone() || is_sparse(parameter) || item.tensor.grad().defined() || at::GradMode::is_enabled() ||
      torch::autograd::impl::post_acc_grad_hooks(item.tensor)) {
    return gradient;
  }
  // One pass over the gradient: no memory to clear, nothing to add to.
  const at::Tensor& view = buckets_.view(parameter);
  view.copy_(gradient);
  item.tensor.mutable_grad() = view;
  return {};
}

void Reducer::arrived(size_t parameter) {
  if (pass_ == nullptr || steps_[parameter] != Step::Arriving) return;
  const at::Tensor& tensor = parameters_[parameter].tensor;
  // A post-accumulate hook that took the gradient away leaves a parameter unreached.
  if (!tensor.grad().defined()) {
    steps_[parameter] = Step::Absent;
    return;
  }
  steps_[parameter] = Step::Ready;
  order_.push_back(parameter);
  if (!is_sparse(parameter)) {
    if (!is_alone()) buckets_.adopt(tensor, parameter);
    --waiting_[buckets_.bucket_of(parameter)];
  }
  if (!is_due(launched_)) {
    drive();
    return;
  }
  while (is_due(launched_)) launch(launched_);
}

// The last bucket carries the flags of all parameters, and waits for the end of backward(): whoever
// has its average knows that no rank computes any more.
bool Reducer::is_due(size_t bucket) const {
  return bucket + 1 < buckets_.size() && waiting_[bucket] == 0;
}

void Reducer::begin() {
  // What a backward that threw left in flight still writes to the buckets.
  for (auto& work : works_) work.wait();
  works_.clear();
  completed_ = launched_ = 0;
  std::fill(steps_.begin(), steps_.end(), Step::Absent);
  order_.clear();
  waiting_.clear();
  for (const auto& members : buckets_.assignment()) waiting_.push_back(members.size());
  while (tags_.size() < buckets_.size()) tags_.push_back(fmt::format("bucket {}", tags_.size()));
  clock_.begin(buckets_.size());
  quiet_ = options_.hook && !options_.hook->communicates();
  if (quiet_ && join_) {
    throw ConfigError(fmt::format(
        "[join] the hook {} does not communicate in every pass, so ranks cannot join others' steps",
        options_.hook->name()));
  }
  if (shadows_) return;

  auto pass = std::make_shared<Pass>();
  pass->reducer = weak_from_this();
  torch::autograd::Engine::get_default_engine().queue_callback([pass] {
    if (const auto owner = pass->reducer.lock()) owner->finish();
  });
  pass_ = pass.get();
}

void Reducer::launch(size_t bucket) {
  const bool last = bucket + 1 == buckets_.size();
  const at::Tensor& flat = buckets_.flat(bucket);
  if (last) write_flags();
  clock_.started(bucket, static_cast<int64_t>(flat.nbytes()));
  launched_ = bucket + 1;
  if (options_.hook) {
    const at::NoGradGuard no_grad;
    works_.push_back(options_.hook->start(group_, buckets_.bucket(bucket)));
    if (last && !quiet_)
      works_.push_back(group_.all_reduce(flags_.elements(), ReduceOp::Sum, {.tag = "flags"}));
  } else {
    const ReduceOp op = divides_by_present() ? ReduceOp::Sum : ReduceOp::Average;
    works_.push_back(group_.all_reduce(flat, op, {.tag = tags_[bucket]}));
  }
}

// Nobody else moves a transport without a thread of its own.
void Reducer::drive() {
  for (; completed_ < works_.size() && works_[completed_].is_completed(); ++completed_) {
    clock_.over(completed_);
  }
}

void Reducer::wait_for_works() {
  for (size_t i = 0; i < works_.size(); ++i) {
    works_[i].wait();
    if (i >= completed_) clock_.over(i);
  }
  works_.clear();
}

void Reducer::finish() {
  const at::NoGradGuard no_grad;
  clock_.last_gradient();
  std::vector<Unreached> unreached;
  if (!all_ready()) unreached = contribute_unreached();
  while (launched_ < buckets_.size()) launch(launched_);
  if (join_) {
    wait_for_works();
    find_present();
  }
  finish_buffers();
  if (!sparse_.empty() && !quiet_) {
    const auto mine = reached();
    sparse_.average({mine.begin() + static_cast<std::ptrdiff_t>(dense_), mine.end()},
                    divides_by_present() ? static_cast<int64_t>(present_.size()) : group_.size());
  }
  if (options_.unused == Unused::Error) refuse_unreached();
  if (!unreached.empty()) settle(unreached);
  if (!rebuilt_ && !quiet_) rebuild();
  std::fill(held_.begin(), held_.end(), false);
  clock_.end();
  pass_ = nullptr;
  if (join_ && join_->uneven == Uneven::Throw && !shadows_ &&
      static_cast<int>(present_.size()) < group_.size()) {
    throw DataError(
        fmt::format("[join] rank {} has a batch for pass {}, but only {} of {} ranks have one: "
                    "give all ranks as "
                    "many (a sampler that pads or drops), or use Uneven::Continue",
                    group_.rank(), clock_.count(), present_.size(), group_.size()));
  }
}

// The flags say which buffers some rank changed. When there were any in the last pass (as always
// with BatchNorm) the collective starts beside the last bucket's, without asking.
void Reducer::finish_buffers() {
  const bool with_buffers = flag_counts_.buffers > 0 && !quiet_, early = buffers_change_;
  if (with_buffers && early) buffers_.start(present_);
  wait_for_works();
  if (!with_buffers) return;
  auto shares = flags_.changed();
  if (options_.hook || divides_by_present()) {  // sums
    for (double& share : shares) share /= group_.size();
  }
  buffers_change_ = std::ranges::any_of(shares, [](double share) { return share > 0; });
  if (!early && !buffers_change_) return;
  if (!join_) buffers_.warn_of_own_changes(shares);
  if (!early) buffers_.start(present_);
  buffers_.finish(shares);
}

void Reducer::find_present() {
  const auto present = flags_.present();
  somebody_ = !present.empty();
  if (!somebody_) return;
  present_ = present;
  if (is_alone() || !divides_by_present()) return;
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    const at::Tensor& flat = buckets_.bucket(bucket).flat;
    // A hook has taken the average over all.
    if (options_.hook) flat.mul_(group_.size());
    flat.div_(static_cast<int64_t>(present_.size()));
  }
}

std::vector<int> Reducer::leave() {
  join_.reset();
  return std::exchange(present_, all_ranks(group_));
}

bool Reducer::shadow() {
  const at::NoGradGuard no_grad;
  for (const auto& item : parameters_) item.tensor.mutable_grad().reset();
  forget();
  shadows_ = true;
  try {
    begin();
    finish();
  } catch (...) {
    shadows_ = false;
    throw;
  }
  shadows_ = false;
  return somebody_;
}

std::vector<char> Reducer::reached() const {
  std::vector<char> reached(parameters_.size());
  for (size_t i = 0; i < reached.size(); ++i) reached[i] = steps_[i] == Step::Ready || held_[i];
  return reached;
}

std::vector<Reducer::Unreached> Reducer::contribute_unreached() {
  std::vector<Unreached> unreached;
  for (size_t i = 0; i < dense_; ++i) {
    if (steps_[i] == Step::Ready) continue;
    const at::Tensor& view = buckets_.view(i);
    const at::Tensor& gradient = parameters_[i].tensor.grad();
    Unreached item{i, {}};
    if (!gradient.defined()) {
      view.zero_();
      held_[i] = false;
    } else if (buckets_.holds(gradient, i)) {
      item.before = view.clone();
    } else {
      view.copy_(gradient);
    }
    unreached.push_back(std::move(item));
  }
  return unreached;
}

void Reducer::write_flags() {
  const at::NoGradGuard no_grad;
  if (shadows_) flags_.write_absent();
  if (flag_counts_.buffers > 0) flags_.write_changed(buffers_.find_changed());
  if (shadows_) return;
  if (all_ready()) {
    flags_.write_all_reached();
  } else {
    flags_.write(reached());
  }
  if (join_) flags_.write_presence(group_.rank());
}

void Reducer::settle(const std::vector<Unreached>& unreached) {
  const auto used = flags_.set();
  for (const auto& [parameter, before] : unreached) {
    // With Error no parameter gets here that some rank lacks.
    if (options_.unused == Unused::Error || used[parameter]) {
      parameters_[parameter].tensor.mutable_grad() = buckets_.view(parameter);
      torch::autograd::impl::bump_version(buckets_.view(parameter));
    } else if (before.defined()) {
      buckets_.view(parameter).copy_(before);
    }
  }
}

void Reducer::refuse_unreached() const {
  if (!flags_.any_set()) return;
  const auto lacking = flags_.set();
  const auto here = reached();
  std::vector<std::string> names;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!lacking[i]) continue;
    names.push_back(
        fmt::format("'{}'{}", parameters_[i].name, here[i] ? " (on another rank)" : ""));
  }
  throw ConfigError(fmt::format(
      "[ddp] rank {}: {} of {} parameters got no gradient in backward(): {}. Give the loss a path "
      "to them, freeze them, or let them count as zero with unused = Unused::Zero",
      group_.rank(), names.size(), parameters_.size(), fmt::join(names, ", ")));
}

void Reducer::forget() {
  std::fill(held_.begin(), held_.end(), false);
  clock_.idle();
}

void Reducer::write(DdpLog& log) const {
  log.rebuilt = rebuilt_;
  log.bucket_bytes.clear();
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    log.bucket_bytes.push_back(static_cast<int64_t>(buckets_.bucket(bucket).flat.nbytes()));
  }
  for (const size_t i : order_) log.order.push_back(parameters_[i].name);
  clock_.write(log);
  if (log.pass_count == 0) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (steps_[i] != Step::Ready) log.unused.push_back(parameters_[i].name);
  }
}

void Reducer::rebuild() {
  rebuilt_ = true;
  std::vector<size_t> order;
  std::copy_if(order_.begin(), order_.end(), std::back_inserter(order),
               [&](size_t i) { return !is_sparse(i); });
  for (const auto& members : buckets_.assignment()) {
    for (size_t i : members) {
      if (steps_[i] != Step::Ready) order.push_back(i);
    }
  }
  const std::string bytes = group_.broadcast_bytes(
      {reinterpret_cast<const char*>(order.data()), order.size() * sizeof(size_t)}, 0,
      {.tag = "Ddp: order of gradients"});
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
  flags_ = Flags(buckets_.flags(), flag_counts_, options_.unused);
}

}  // namespace lockstep::parallel
