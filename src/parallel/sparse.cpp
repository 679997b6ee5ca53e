#include "parallel/sparse.h"

#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <bit>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::parallel {
namespace {

// In place of a number of entries.
constexpr int64_t kUnreached = -1, kDense = -2, kBroken = -3;

// In the order of all transports: n addends are split at the largest power of two below n.
at::Tensor tree_sum(const std::vector<at::Tensor>& addends, size_t begin, size_t end) {
  if (end - begin == 1) return addends[begin];
  const size_t half = std::bit_floor(end - begin - 1);
  return tree_sum(addends, begin, begin + half) + tree_sum(addends, begin + half, end);
}

// Collectives know no complex numbers.
at::Tensor as_real(const at::Tensor& values) {
  return values.is_complex() ? at::view_as_real(values) : values;
}

// Each index once. Checked, because the kernels would read past the end.
at::Tensor summed_up(const at::Tensor& gradient, const at::Tensor& parameter) {
  TORCH_CHECK(gradient.sizes() == parameter.sizes(), "its sizes are ", gradient.sizes(),
              ", the parameter's ", parameter.sizes());
  at::_validate_sparse_coo_tensor_args(gradient._indices(), gradient._values(), gradient.sizes());
  return gradient.coalesce();
}

// `all`: by rank and parameter.
bool reached_by_any(const at::Tensor& all, int64_t parameter) {
  return all.select(1, parameter).select(1, 2).max().item<int64_t>() == 1;
}

}  // namespace

void SparseGradients::average(const std::vector<char>& reached, int64_t divisor) const {
  const at::NoGradGuard no_grad;
  const int64_t count = static_cast<int64_t>(parameters_.size()), ranks = group_.size();
  std::vector<at::Tensor> mine(parameters_.size());
  // By parameter: how many entries, how many of the dimensions are sparse, and whether this rank
  // reached it. One that did not contributes what an earlier backward left, as with dense ones.
  at::Tensor own = at::full({count, 3}, kUnreached, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor& gradient = parameters_[i].tensor.grad();
    if (!gradient.defined()) continue;
    own[i][2] = static_cast<int64_t>(reached[i] ? 1 : 0);
    own[i][0] = kDense;
    if (!gradient.is_sparse()) continue;
    try {
      mine[i] = summed_up(gradient, parameters_[i].tensor);
    } catch (const c10::Error& error) {
      own[i][0] = kBroken;
      log::warn(fmt::format("[ddp] the sparse gradient of parameter '{}': {}", parameters_[i].name,
                            error.what_without_backtrace()));
      continue;
    }
    own[i][0] = mine[i]._nnz();
    own[i][1] = mine[i].sparse_dim();
  }
  at::Tensor all = at::empty({ranks, count, 3}, at::kLong);
  group_.all_gather(all, own, {.tag = "sparse gradients: counts"}).wait();
  refuse_unfit(all);
  for (int64_t i = 0; i < count; ++i) {
    if (!reached_by_any(all, i)) continue;
    const at::Tensor nnz = all.select(1, i).select(1, 0).contiguous();
    const int64_t sparse_dim = all.select(1, i).select(1, 1).max().item<int64_t>();
    std::vector<int64_t> counts(nnz.const_data_ptr<int64_t>(),
                                nnz.const_data_ptr<int64_t>() + ranks);
    parameters_[i].tensor.mutable_grad() =
        sum(parameters_[i], mine[i], counts, sparse_dim).div_(divisor);
  }
}

// `all`: by rank and parameter. The others wait for this rank's entries unless all are told.
void SparseGradients::refuse_unfit(const at::Tensor& all) const {
  for (int64_t i = 0; i < all.size(1); ++i) {
    const std::string& name = parameters_[i].name;
    if (!reached_by_any(all, i)) continue;
    int64_t dimensions = kUnreached;
    for (int64_t rank = 0; rank < all.size(0); ++rank) {
      const auto entries = all[rank][i][0].item<int64_t>(),
                 sparse = all[rank][i][1].item<int64_t>();
      if (entries == kDense) {
        throw ConfigError(fmt::format(
            "[ddp] the gradient of parameter '{}' on rank {} is dense, but it belongs to a layer "
            "with sparse = true or is named in DdpOptions::sparse: a table that is also used "
            "elsewhere needs sparse = false",
            name, rank));
      }
      if (entries == kBroken) {
        throw ConfigError(fmt::format(
            "[ddp] the sparse gradient of parameter '{}' on rank {} has indices outside of the "
            "parameter or values of other sizes: look at what computes it (that rank's log says "
            "more)",
            name, rank));
      }
      if (entries == kUnreached) continue;
      if (dimensions != kUnreached && dimensions != sparse) {
        throw ConfigError(fmt::format(
            "[ddp] the gradient of parameter '{}' has {} sparse dimensions on rank {} and {} on a "
            "rank below: compute it alike on all ranks",
            name, sparse, rank, dimensions));
      }
      dimensions = sparse;
    }
  }
}

at::Tensor SparseGradients::sum(const Named& parameter, const at::Tensor& mine,
                                const std::vector<int64_t>& counts, int64_t sparse_dim) const {
  const at::Tensor& tensor = parameter.tensor;
  const auto with_front = [](int64_t front, at::IntArrayRef rest) {
    std::vector<int64_t> sizes{front};
    sizes.insert(sizes.end(), rest.begin(), rest.end());
    return sizes;
  };
  // Entries first, so that each rank's part is contiguous.
  std::vector<at::Tensor> indices, values, reals;
  for (const int64_t given : counts) {
    const int64_t entries = std::max<int64_t>(given, 0);
    indices.push_back(at::empty({entries, sparse_dim}, at::kLong));
    values.push_back(at::empty(with_front(entries, tensor.sizes().slice(sparse_dim)),
                               tensor.options().requires_grad(false)));
    reals.push_back(as_real(values.back()));
  }
  const int own = group_.rank();
  if (mine.defined()) {
    indices[own].copy_(mine.indices().t());
    values[own].copy_(mine.values());
  }
  group_.all_gather(indices, indices[own].clone(), {.tag = "sparse gradients: indices"}).wait();
  group_.all_gather(reals, reals[own].clone(), {.tag = "sparse gradients: values"}).wait();
  std::vector<at::Tensor> addends;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    addends.push_back(at::_sparse_coo_tensor_unsafe(
        indices[rank].t().contiguous().to(tensor.device()), values[rank], tensor.sizes(),
        values[rank].options().layout(at::kSparse),
        /*is_coalesced=*/true));
  }
  return tree_sum(addends, 0, addends.size());
}

}  // namespace lockstep::parallel
