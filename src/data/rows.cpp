#include "data/rows.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>

#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

bool is_reusable(const at::Tensor& spare, at::IntArrayRef sizes, at::ScalarType dtype) {
  return spare.defined() && spare.use_count() == 1 && spare.storage().use_count() == 1 &&
         spare.scalar_type() == dtype && spare.sizes() == sizes && spare.is_contiguous() &&
         spare.is_cpu() && spare.unsafeGetTensorImpl()->autograd_meta() == nullptr;
}

}  // namespace

void check_indices(std::string_view address, at::IntArrayRef indices, int64_t size) {
  const auto bad = std::find_if(indices.begin(), indices.end(),
                                [size](int64_t i) { return i < 0 || i >= size; });
  if (bad != indices.end()) {
    throw DataError(fmt::format("{} sample {} does not exist: there are {}", address, *bad, size));
  }
}

at::Tensor reuse_or_empty(at::Tensor spare, at::IntArrayRef sizes, at::ScalarType dtype) {
  if (is_reusable(spare, sizes, dtype)) return spare;
  return at::empty(sizes, dtype);
}

}  // namespace lockstep::data
