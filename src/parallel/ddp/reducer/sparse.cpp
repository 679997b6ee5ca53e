#include "parallel/ddp/reducer/sparse.h"

#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>

#include "comm/reduce/tree.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "parallel/layout/flat_memory.h"

namespace lockstep::parallel {
namespace {

// In place of a number of entries.
constexpr int64_t kUnreached = -1, kDense = -2, kBroken = -3;

// In the order of all transports.
at::Tensor tree_sum(const std::vector<at::Tensor>& addends, Range node) {
  if (node.size() == 1) return addends[node.begin];
  const int64_t half = comm::middle(node);
  return tree_sum(addends, {node.begin, half}) + tree_sum(addends, {half, node.end});
}

// Each index once. Checked, because the kernels would read past the end.
at::Tensor summed_up(const at::Tensor& gradient, const at::Tensor& parameter) {
  TORCH_CHECK(gradient.sizes() == parameter.sizes(), "its sizes are ", gradient.sizes(),
              ", the parameter's ", parameter.sizes());
  at::_validate_sparse_coo_tensor_args(gradient._indices(), gradient._values(), gradient.sizes());
  return gradient.coalesce();
}

// `all`: by addend and parameter.
bool reached_by_any(const at::Tensor& all, int64_t parameter) {
  return all.select(1, parameter).select(1, 2).max().item<int64_t>() == 1;
}

}  // namespace

void SparseGradients::average(const std::vector<char>& reached, int64_t divisor) const {
  Mine mine;
  // A parameter that this rank did not reach contributes what an earlier backward left, as with
  // dense ones.
  for (const auto& item : parameters_) mine.push_back({item.tensor.grad()});
  Addends addends{.of_ranks = {}, .unit = "rank"};
  for (int64_t rank = 0; rank < group_.size(); ++rank) {
    addends.of_ranks.push_back({rank, rank + 1});
  }
  average(std::move(mine), reached, addends, divisor);
}

void SparseGradients::average_lanes(const Mine& mine, const std::vector<char>& reached,
                                    int64_t lanes) const {
  Addends addends{.of_ranks = {}, .unit = "lane"};
  for (int64_t rank = 0; rank < group_.size(); ++rank) {
    addends.of_ranks.push_back(Shard{rank, group_.size()}.of(lanes));
  }
  average(mine, reached, addends, lanes);
}

void SparseGradients::average(Mine mine, const std::vector<char>& reached, const Addends& addends,
                              int64_t divisor) const {
  const at::NoGradGuard no_grad;
  const int64_t count = static_cast<int64_t>(parameters_.size());
  at::Tensor all = at::full({addends.count(), count, 3}, kUnreached, at::kLong);
  std::vector<at::Tensor> by_rank;
  for (const Range& range : addends.of_ranks) {
    by_rank.push_back(all.narrow(0, range.begin, range.size()));
  }
  // By addend and parameter: how many entries, how many of the dimensions are sparse, and whether
  // this rank reached it.
  at::Tensor own = by_rank[group_.rank()].clone();
  for (int64_t i = 0; i < count; ++i) {
    for (size_t addend = 0; addend < mine[i].size(); ++addend) {
      at::Tensor& gradient = mine[i][addend];
      if (!gradient.defined()) continue;
      at::Tensor entry = own[static_cast<int64_t>(addend)][i];
      entry[2] = static_cast<int64_t>(reached[i] ? 1 : 0);
      entry[0] = kDense;
      if (!gradient.is_sparse()) {
        gradient = at::Tensor();
        continue;
      }
      try {
        gradient = summed_up(gradient, parameters_[i].tensor);
      } catch (const c10::Error& error) {
        entry[0] = kBroken;
        log::warn(fmt::format("[ddp] the sparse gradient of parameter '{}': {}",
                              parameters_[i].name, error.what_without_backtrace()));
        gradient = at::Tensor();
        continue;
      }
      entry[0] = gradient._nnz();
      entry[1] = gradient.sparse_dim();
    }
  }
  group_.all_gather(by_rank, own, {.label = "sparse gradients: counts"}).wait();
  refuse_unfit(all, addends.unit);
  for (int64_t i = 0; i < count; ++i) {
    if (!reached_by_any(all, i)) continue;
    const at::Tensor nnz = all.select(1, i).select(1, 0).contiguous();
    const int64_t sparse_dim = all.select(1, i).select(1, 1).max().item<int64_t>();
    std::vector<int64_t> counts(nnz.const_data_ptr<int64_t>(),
                                nnz.const_data_ptr<int64_t>() + nnz.numel());
    parameters_[i].tensor.mutable_grad() =
        sum(parameters_[i], mine[i], addends, counts, sparse_dim).div_(divisor);
  }
}

// `all`: by addend and parameter. All ranks throw, since the others would wait for this rank's
// entries.
void SparseGradients::refuse_unfit(const at::Tensor& all, std::string_view unit) const {
  for (int64_t i = 0; i < all.size(1); ++i) {
    const std::string& name = parameters_[i].name;
    if (!reached_by_any(all, i)) continue;
    int64_t dimensions = kUnreached;
    for (int64_t rank = 0; rank < all.size(0); ++rank) {
      const auto entries = all[rank][i][0].item<int64_t>(),
                 sparse = all[rank][i][1].item<int64_t>();
      if (entries == kDense) {
        throw ConfigError(fmt::format(
            "[ddp] the gradient of parameter '{}' on {} {} is dense, but it belongs to a layer "
            "with sparse = true or is named in DdpOptions::sparse: a table that is also used "
            "elsewhere needs sparse = false",
            name, unit, rank));
      }
      if (entries == kBroken) {
        throw ConfigError(fmt::format(
            "[ddp] the sparse gradient of parameter '{}' on {} {} has indices outside of the "
            "parameter or values of other sizes: look at what computes it (that rank's log says "
            "more)",
            name, unit, rank));
      }
      if (entries == kUnreached) continue;
      if (dimensions != kUnreached && dimensions != sparse) {
        throw ConfigError(fmt::format(
            "[ddp] the gradient of parameter '{}' has {} sparse dimensions on {} {} and {} on a "
            "{} below: compute it in the same way on all ranks",
            name, sparse, unit, rank, dimensions, unit));
      }
      dimensions = sparse;
    }
  }
}

at::Tensor SparseGradients::sum(const Named& parameter, const std::vector<at::Tensor>& mine,
                                const Addends& addends, const std::vector<int64_t>& counts,
                                int64_t sparse_dim) const {
  const at::Tensor& tensor = parameter.tensor;
  const auto with_front = [](int64_t front, at::IntArrayRef rest) {
    std::vector<int64_t> sizes{front};
    sizes.insert(sizes.end(), rest.begin(), rest.end());
    return sizes;
  };
  // Entries first, so that each rank's part is contiguous, and in it each addend's.
  std::vector<at::Tensor> of_ranks, reals, indices, values;
  for (const Range& range : addends.of_ranks) {
    int64_t entries = 0;
    for (int64_t a = range.begin; a < range.end; ++a) entries += std::max<int64_t>(counts[a], 0);
    of_ranks.push_back(at::empty({entries, sparse_dim}, at::kLong));
    const at::Tensor all = at::empty(with_front(entries, tensor.sizes().slice(sparse_dim)),
                                     tensor.options().requires_grad(false));
    reals.push_back(as_reals(all));
    int64_t begin = 0;
    for (int64_t a = range.begin; a < range.end; ++a) {
      const int64_t length = std::max<int64_t>(counts[a], 0);
      indices.push_back(of_ranks.back().narrow(0, begin, length));
      values.push_back(all.narrow(0, begin, length));
      begin += length;
    }
  }
  const int rank = group_.rank();
  for (size_t i = 0; i < mine.size(); ++i) {
    if (!mine[i].defined()) continue;
    const int64_t addend = addends.of_ranks[rank].begin + static_cast<int64_t>(i);
    indices[addend].copy_(mine[i].indices().t());
    values[addend].copy_(mine[i].values());
  }
  group_.all_gather(of_ranks, of_ranks[rank].clone(), {.label = "sparse gradients: indices"})
      .wait();
  group_.all_gather(reals, reals[rank].clone(), {.label = "sparse gradients: values"}).wait();
  std::vector<at::Tensor> terms;
  for (size_t addend = 0; addend < counts.size(); ++addend) {
    terms.push_back(at::_sparse_coo_tensor_unsafe(
        indices[addend].t().contiguous().to(tensor.device()), values[addend], tensor.sizes(),
        values[addend].options().layout(at::kSparse),
        /*is_coalesced=*/true));
  }
  return tree_sum(terms, {0, static_cast<int64_t>(terms.size())});
}

}  // namespace lockstep::parallel
