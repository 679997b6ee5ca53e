#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <optional>

#include "core/hash/mix.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/hooks.h"
#include "parallel/hooks/state.h"
#include "parallel/layout/flat_memory.h"

namespace lockstep::parallel {
namespace {

constexpr char kError[] = "error/", kQ[] = "q/";

// A gradient as a matrix of n x m, approximated in rank r.
struct Compressed {
  int64_t n, m, r;
};

// The columns, made so; in float32, as LAPACK knows no narrower dtype.
at::Tensor orthonormal(const at::Tensor& p) {
  const bool wide = p.scalar_type() == at::kDouble || p.scalar_type() == at::kFloat;
  return std::get<0>(at::linalg_qr(wide ? p : p.to(at::kFloat))).to(p.scalar_type());
}

// Nothing where it does not pay.
std::optional<Compressed> compressed(const at::Tensor& gradient, const PowerSgdOptions& options) {
  if (gradient.dim() < 2 || gradient.is_complex()) return {};
  const int64_t n = gradient.size(0), m = n == 0 ? 0 : gradient.numel() / n;
  const int64_t r = std::min({n, m, options.rank});
  if (static_cast<double>((n + m) * r) * options.least_compression >= static_cast<double>(n * m)) {
    return {};
  }
  return Compressed{n, m, r};
}

at::Tensor first_q(std::string_view name, at::IntArrayRef sizes, int64_t iteration,
                   const PowerSgdOptions& options) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(
      options.seed ^ fnv1a<uint64_t>(name) ^
      (options.warm_start ? 0 : static_cast<uint64_t>(iteration)));
  return at::randn(sizes, generator, at::TensorOptions(at::kFloat));
}

}  // namespace

// A pass's compressed gradients of one bucket: M is n x m and becomes P Q^T, with P n x r and Q m x
// r.
struct PowerSgd::Factors {
  std::vector<std::string> names;
  std::vector<at::Tensor> gradients, matrices, starts, ps, orthonormal, qs;
  // What is averaged in the first collective and the second, one matrix after another.
  at::Tensor first, second;
  // Gradients that go as they are, at the end of the first.
  std::vector<at::Tensor> exact, exact_parts;
};

PowerSgd::PowerSgd(PowerSgdOptions options)
    : options_(options), kept_(std::make_shared<HookState>("power_sgd")) {
  if (options.rank < 1 || options.start_iteration < 1) {
    throw ConfigError(
        fmt::format("[power_sgd] rank = {} and start_iteration = {}: both must be at least 1",
                    options.rank, options.start_iteration));
  }
}

comm::Work PowerSgd::start(const Group& group, const Bucket& bucket) {
  const std::string label = fmt::format("bucket {}", bucket.index);
  const int64_t iteration = iteration_;
  const bool exactly = iteration < options_.start_iteration;
  // A pass ends with its last bucket.
  if (bucket.last) ++iteration_;
  gradients_ = bucket.index == 0 ? 0 : gradients_;
  gradients_ += bucket.names.size();
  if (exactly) {
    bytes_ += static_cast<int64_t>(bucket.flat.nbytes());
    return group.all_reduce(bucket.flat, ReduceOp::Average, {.label = label});
  }

  kept_->begin(bucket);
  auto factors = std::make_shared<Factors>();
  auto first = FlatLayout::packed(bucket.flat.scalar_type()), second = first;
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    const at::Tensor& gradient = bucket.gradients[i];
    const auto shape = compressed(gradient, options_);
    if (!shape) {
      factors->exact.push_back(as_reals(gradient));
      continue;
    }
    const auto [n, m, r] = *shape;
    const std::string& name = bucket.names[i];
    at::Tensor matrix = gradient.reshape({n, m}).clone(at::MemoryFormat::Contiguous);
    const at::Tensor error = kept_->of(kError + name);
    if (error.defined()) matrix.add_(error);
    at::Tensor q = kept_->of(kQ + name);
    if (!q.defined() || !options_.warm_start) {
      q = first_q(name, {m, r}, iteration, options_).to(gradient.options());
    }
    // That of the pass before has the gradient's size, and M Q would have its square.
    q = orthonormal(q);
    factors->names.push_back(name);
    factors->gradients.push_back(gradient);
    factors->matrices.push_back(matrix);
    factors->starts.push_back(q);
    first.add(name, n * r);
    second.add(name, m * r);
  }
  for (const auto& gradient : factors->exact) first.add("exact", gradient.numel());

  factors->first = at::empty({first.numel()}, bucket.flat.options());
  factors->second = at::empty({second.numel()}, bucket.flat.options());
  const size_t compressed_count = factors->names.size();
  for (size_t i = 0; i < compressed_count; ++i) {
    const int64_t r = factors->starts[i].size(1);
    factors->ps.push_back(member_of(factors->first, first, i).view({-1, r}));
    // Into memory of its own: a kernel may round otherwise where a bucket's layout shifts it.
    factors->ps[i].copy_(at::mm(factors->matrices[i], factors->starts[i]));
    factors->qs.push_back(member_of(factors->second, second, i).view({-1, r}));
  }
  for (size_t i = 0; i < factors->exact.size(); ++i) {
    const at::Tensor& gradient = factors->exact[i];
    factors->exact_parts.push_back(
        member_of(factors->first, first, compressed_count + i).view(gradient.sizes()));
    factors->exact_parts[i].copy_(gradient);
  }
  bytes_ += static_cast<int64_t>(factors->first.nbytes() + factors->second.nbytes());

  const auto decompress = [=, kept = kept_, feedback = options_.error_feedback] {
    for (size_t i = 0; i < factors->names.size(); ++i) {
      const at::Tensor q = factors->qs[i].clone();
      const at::Tensor approximation = at::mm(factors->orthonormal[i], q.t());
      factors->gradients[i].copy_(approximation.view(factors->gradients[i].sizes()));
      if (feedback) {
        kept->stage(kError + factors->names[i], factors->matrices[i].sub_(approximation));
      }
      kept->stage(kQ + factors->names[i], q);
    }
    kept->settle(bucket);
    return comm::Work();
  };
  return then(group.all_reduce(factors->first, ReduceOp::Average, {.label = label}), [=] {
    for (size_t i = 0; i < factors->exact.size(); ++i)
      factors->exact[i].copy_(factors->exact_parts[i]);
    for (size_t i = 0; i < factors->names.size(); ++i) {
      factors->orthonormal.push_back(orthonormal(factors->ps[i].clone()));
      factors->qs[i].copy_(at::mm(factors->matrices[i].t(), factors->orthonormal[i]));
    }
    if (factors->names.empty()) return decompress();
    return then(group.all_reduce(factors->second, ReduceOp::Average, {.label = label}), decompress);
  });
}

void PowerSgd::attach(const Tensors& parameters) {
  HookState::Layout layout;
  for (const auto& [name, parameter] : parameters) {
    const auto shape = compressed(parameter, options_);
    if (!shape) continue;
    if (options_.error_feedback)
      layout.try_emplace(kError + name, expected_for(parameter, {shape->n, shape->m}));
    layout.try_emplace(kQ + name, expected_for(parameter, {shape->m, shape->r}));
  }
  kept_->attach(std::move(layout));
}

void PowerSgd::end_pass(const std::vector<std::string>& unused) {
  if (gradients_ > 0 && unused.size() >= gradients_) --iteration_;
  for (const auto& name : unused) {
    const at::Tensor error = kept_->of(kError + name), q = kept_->of(kQ + name);
    if (error.defined()) kept_->revert(kError + name, at::zeros_like(error));
    if (q.defined())
      kept_->revert(kQ + name, first_q(name, q.sizes(), iteration_, options_).to(q.options()));
  }
  kept_->end_pass();
}

Tensors PowerSgd::state() const {
  Tensors state = kept_->tensors();
  state["iteration"] = at::scalar_tensor(iteration_, at::kLong);
  return state;
}

void PowerSgd::restore(const Tensors& state) {
  const int64_t iteration = number_in(name(), state, "iteration");
  Tensors kept = state;
  kept.erase("iteration");
  kept_->restore(kept, {kError, kQ});
  iteration_ = iteration;
}

void PowerSgd::check(const Tensors& state) const {
  number_in(name(), state, "iteration");
  Tensors kept = state;
  kept.erase("iteration");
  kept_->check(kept, {kError, kQ});
}

void PowerSgd::rescale(double factor) { kept_->rescale(factor); }

}  // namespace lockstep::parallel
