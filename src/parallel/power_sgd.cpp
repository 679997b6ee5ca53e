#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/parallel/hooks.h"
#include "parallel/hook_state.h"
#include "parallel/packed.h"

namespace lockstep::parallel {
namespace {

constexpr char kError[] = "error/", kQ[] = "q/";

// FNV-1a: a parameter's random start must be the same on every rank.
uint64_t hash_of(std::string_view text) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

}  // namespace

// A pass's compressed gradients of one bucket: M is n x m and becomes P Q^T, with P n x r and Q m x
// r.
struct PowerSgd::Factors {
  std::vector<std::string> names;
  std::vector<at::Tensor> gradients, matrices, ps, qs;
  // What is averaged in the first collective and the second, one matrix after another.
  at::Tensor first, second;
  // Gradients that go as they are, at the end of the first.
  std::vector<at::Tensor> exact, exact_parts;
};

PowerSgd::PowerSgd(PowerSgdOptions options) : options_(options) {
  if (options.rank < 1 || options.start_iteration < 1) {
    throw ConfigError(
        fmt::format("[power_sgd] rank = {} and start_iteration = {}: both must be at least 1",
                    options.rank, options.start_iteration));
  }
}

comm::Work PowerSgd::start(const Group& group, const Bucket& bucket) {
  const std::string tag = fmt::format("bucket {}", bucket.index);
  const bool exactly = iteration_ < options_.start_iteration;
  // A pass ends with its last bucket.
  if (bucket.last) ++iteration_;
  if (exactly) {
    bytes_ += static_cast<int64_t>(bucket.flat.nbytes());
    return group.all_reduce(bucket.flat, ReduceOp::Average, {.tag = tag});
  }

  auto factors = std::make_shared<Factors>();
  std::vector<int64_t> ranks;
  int64_t first = 0, second = 0;
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    const at::Tensor& gradient = bucket.gradients[i];
    const int64_t n = gradient.dim() > 0 ? gradient.size(0) : 1,
                  m = n == 0 ? 0 : gradient.numel() / n;
    const int64_t r = std::min({n, m, options_.rank});
    const bool pays =
        gradient.dim() > 1 && !gradient.is_complex() &&
        static_cast<double>((n + m) * r) * options_.least_compression < static_cast<double>(n * m);
    if (!pays) {
      factors->exact.push_back(gradient.is_complex() ? at::view_as_real(gradient) : gradient);
      continue;
    }
    const std::string& name = bucket.names[i];
    at::Tensor matrix = gradient.reshape({n, m}).clone();
    if (options_.error_feedback) {
      at::Tensor& error = errors_[name];
      if (error.defined()) matrix.add_(error);
    }
    at::Tensor& q = qs_[name];
    if (!q.defined() || !options_.warm_start) {
      auto generator = at::make_generator<at::CPUGeneratorImpl>(
          options_.seed ^ hash_of(name) ^
          (options_.warm_start ? 0 : static_cast<uint64_t>(iteration_)));
      q = at::randn({m, r}, generator, at::TensorOptions(at::kFloat)).to(gradient.options());
    }
    factors->names.push_back(name);
    factors->gradients.push_back(gradient);
    factors->matrices.push_back(matrix);
    ranks.push_back(r);
    first += n * r;
    second += m * r;
  }
  for (const auto& gradient : factors->exact) first += gradient.numel();

  factors->first = at::empty({first}, bucket.flat.options());
  factors->second = at::empty({second}, bucket.flat.options());
  int64_t offset = 0;
  const auto take = [&](const at::Tensor& from, at::IntArrayRef sizes) {
    const int64_t numel = c10::multiply_integers(sizes);
    offset += numel;
    return from.narrow(0, offset - numel, numel).view(sizes);
  };
  for (size_t i = 0; i < ranks.size(); ++i) {
    factors->ps.push_back(take(factors->first, {factors->matrices[i].size(0), ranks[i]}));
    at::mm_out(factors->ps[i], factors->matrices[i], qs_[factors->names[i]]);
  }
  for (const auto& gradient : factors->exact) {
    factors->exact_parts.push_back(take(factors->first, gradient.sizes()));
    factors->exact_parts.back().copy_(gradient);
  }
  offset = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    factors->qs.push_back(take(factors->second, {factors->matrices[i].size(1), ranks[i]}));
  }
  bytes_ += static_cast<int64_t>(factors->first.nbytes() + factors->second.nbytes());

  const auto decompress = [this, factors] {
    for (size_t i = 0; i < factors->names.size(); ++i) {
      const at::Tensor approximation = at::mm(factors->ps[i], factors->qs[i].t());
      factors->gradients[i].copy_(approximation.view(factors->gradients[i].sizes()));
      if (options_.error_feedback)
        errors_[factors->names[i]] = factors->matrices[i].sub_(approximation);
      qs_[factors->names[i]] = factors->qs[i].clone();
    }
    return comm::Work();
  };
  return then(group.all_reduce(factors->first, ReduceOp::Average, {.tag = tag}), [=] {
    for (size_t i = 0; i < factors->exact.size(); ++i)
      factors->exact[i].copy_(factors->exact_parts[i]);
    for (size_t i = 0; i < factors->names.size(); ++i) {
      // Orthonormal columns; in float32, as LAPACK knows no narrower dtype.
      const at::Tensor p = factors->ps[i];
      p.copy_(std::get<0>(at::linalg_qr(p.scalar_type() == at::kDouble ? p : p.to(at::kFloat))));
      at::mm_out(factors->qs[i], factors->matrices[i].t(), p);
    }
    if (factors->names.empty()) return comm::Work();
    return then(group.all_reduce(factors->second, ReduceOp::Average, {.tag = tag}), decompress);
  });
}

Tensors PowerSgd::state() const {
  Tensors state{{"iteration", at::scalar_tensor(iteration_, at::kLong)}};
  for (const auto& [name, error] : errors_) state[kError + name] = error;
  for (const auto& [name, q] : qs_) state[kQ + name] = q;
  return state;
}

void PowerSgd::restore(const Tensors& state) {
  const Tensors copies = checked_state(name(), state, {"iteration", kError, kQ});
  iteration_ = number_in(name(), copies, "iteration");
  errors_.clear();
  qs_.clear();
  for (const auto& [key, tensor] : copies) {
    if (key.starts_with(kError)) errors_[key.substr(sizeof kError - 1)] = tensor;
    if (key.starts_with(kQ)) qs_[key.substr(sizeof kQ - 1)] = tensor;
  }
}

}  // namespace lockstep::parallel
