#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "random/changes/plain.h"

namespace lockstep::test::changes {
namespace {

at::Tensor mean(const std::vector<at::Tensor>& all) {
  at::Tensor sum = all[0].clone();
  for (size_t i = 1; i < all.size(); ++i) sum += all[i];
  return sum / static_cast<double>(all.size());
}

// In the order of docs/architecture.md, each addition rounded to the dtype.
at::Tensor tree_sum(const std::vector<at::Tensor>& all, size_t begin, size_t end) {
  if (end - begin == 1) return all[begin];
  size_t half = 1;
  while (2 * half < end - begin) half *= 2;
  return tree_sum(all, begin, begin + half) + tree_sum(all, begin + half, end);
}

at::Tensor first_q(const std::string& name, at::IntArrayRef sizes) {
  uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a
  for (const char letter : name)
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3U;
  return at::randn(sizes, at::detail::createCPUGenerator(hash), at::kFloat).to(at::kDouble);
}

at::Tensor orthonormal(const at::Tensor& columns) { return std::get<0>(at::linalg_qr(columns)); }

bool is_finite(const std::vector<at::Tensor>& all) {
  return std::ranges::all_of(
      all, [](const at::Tensor& each) { return at::isfinite(each).all().item<bool>(); });
}

}  // namespace

void PlainHook::begin(int ranks, const PlainHook* before, const Named& parameters) {
  ranks_ = ranks;
  if (before == nullptr) return;
  passes_ = before->passes_;
  for (const auto& [name, kept] : before->kept_) {
    const auto found = std::ranges::find(parameters, name, &Named::value_type::first);
    if (found == parameters.end()) continue;
    Kept own = kept;
    own.parameter = found->second;
    if (before->ranks_ != ranks && !own.errors.empty()) {
      own.errors.assign(static_cast<size_t>(ranks), mean(own.errors));
    }
    kept_.emplace_back(name, own);
  }
}

void PlainHook::keep_attached(const Named& parameters) {
  std::vector<std::pair<std::string, Kept>> now;
  for (const auto& [name, parameter] : parameters) {
    for (const auto& [old, kept] : kept_) {
      if (kept.parameter.is_same(parameter)) now.emplace_back(name, kept);
    }
  }
  kept_ = std::move(now);
}

Named PlainHook::average(const Named& parameters,
                         const std::vector<std::vector<at::Tensor>>& gradients) {
  const at::NoGradGuard no_grad;
  const bool exactly = kind_ == Hook::PowerSgd && passes_ < 2;
  ++passes_;
  Named averages;
  std::vector<std::pair<std::string, Kept>> next;
  bool good = true;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, parameter] = parameters[i];
    good = good && is_finite(gradients[i]);
    const auto found = std::ranges::find_if(
        kept_, [&](const auto& each) { return each.second.parameter.is_same(parameter); });
    Kept kept{.parameter = parameter, .errors = {}, .q = {}};
    if (found != kept_.end()) kept = found->second;
    std::vector<at::Tensor> sums;
    for (size_t rank = 0; rank < gradients[i].size(); ++rank) {
      sums.push_back(gradients[i][rank].clone());
      const bool has_error = feedback_ && !kept.errors.empty() && !exactly;
      if (has_error) sums.back() += kept.errors[rank];
    }
    at::Tensor made;
    if (!good) {
      made = at::full_like(parameter, NAN);
    } else if (exactly || (kind_ == Hook::PowerSgd && parameter.dim() < 2)) {
      made = mean(gradients[i]);
    } else {
      made = kind_ == Hook::PowerSgd ? approximate(name, sums, kept)
             : kind_ == Hook::TopK   ? largest(sums, kept.errors)
                                     : cast(sums, kept.errors);
      next.emplace_back(name, kept);
    }
    averages.emplace_back(name, made);
  }
  if (!good) return averages;
  for (auto& item : next) {
    const auto found = std::ranges::find_if(kept_, [&](const auto& each) {
      return each.second.parameter.is_same(item.second.parameter);
    });
    found == kept_.end() ? kept_.push_back(item) : static_cast<void>(*found = item);
  }
  return averages;
}

at::Tensor PlainHook::cast(const std::vector<at::Tensor>& sums,
                           std::vector<at::Tensor>& errors) const {
  const auto dtype = kind_ == Hook::Half     ? at::kHalf
                     : kind_ == Hook::BFloat ? at::kBFloat16
                                             : at::kFloat;
  // So that the sum does not overflow.
  const double share = kind_ == Hook::Half ? ranks_ : 1;
  std::vector<at::Tensor> sent;
  errors.clear();
  for (const auto& sum : sums) {
    sent.push_back((sum / share).to(dtype));
    errors.push_back(sum - sent.back().to(at::kDouble) * share);
  }
  const at::Tensor sum = tree_sum(sent, 0, sent.size());
  return (kind_ == Hook::Half ? sum : sum / static_cast<double>(ranks_)).to(at::kDouble);
}

at::Tensor PlainHook::largest(const std::vector<at::Tensor>& sums,
                              std::vector<at::Tensor>& errors) const {
  std::vector<at::Tensor> sent;
  errors.clear();
  for (const auto& sum : sums) {
    const auto count = std::max<int64_t>(1, std::llround(0.3 * static_cast<double>(sum.numel())));
    const auto places = std::get<1>(sum.flatten().abs().topk(count));
    sent.push_back(at::zeros_like(sum));
    sent.back().view(-1).index_copy_(0, places, sum.flatten().index_select(0, places));
    errors.push_back(sum - sent.back());
  }
  return mean(sent);
}

at::Tensor PlainHook::approximate(const std::string& name, const std::vector<at::Tensor>& gradients,
                                  Kept& kept) const {
  const int64_t m = gradients[0].size(1);
  const at::Tensor q = orthonormal(kept.q.defined() ? kept.q : first_q(name, {m, 2}));
  std::vector<at::Tensor> ps, qs;
  for (const auto& matrix : gradients) ps.push_back(matrix.mm(q));
  const at::Tensor p = orthonormal(mean(ps));
  for (const auto& matrix : gradients) qs.push_back(matrix.t().mm(p));
  kept.q = mean(qs);
  const at::Tensor made = p.mm(kept.q.t());
  kept.errors.clear();
  for (const auto& matrix : gradients) kept.errors.push_back(matrix - made);
  return made;
}

void PlainHook::rescale(double factor) {
  for (auto& [name, kept] : kept_) {
    for (auto& error : kept.errors) error = error * factor;
  }
}

}  // namespace lockstep::test::changes
