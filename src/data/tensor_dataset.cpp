#include "lockstep/data/tensor_dataset.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "data/rows.h"
#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

constexpr const char* kTensors = "[tensor data set]";

// Not as numbers of that size: rows of two float32 need not lie at multiples of 8 bytes.
template <typename Size>
void copy_rows_of(Size row_bytes, char* to, const char* from, at::IntArrayRef indices) {
  for (size_t i = 0; i < indices.size(); ++i) {
    std::memcpy(to + i * row_bytes, from + static_cast<size_t>(indices[i]) * row_bytes, row_bytes);
  }
}

void copy_rows(void* to, const void* from, size_t row_bytes, at::IntArrayRef indices) {
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  // A scalar per sample is a load and a store; a memcpy of variable length would cost five times
  // that.
  if (row_bytes == 4) return copy_rows_of(std::integral_constant<size_t, 4>(), out, in, indices);
  if (row_bytes == 8) return copy_rows_of(std::integral_constant<size_t, 8>(), out, in, indices);
  copy_rows_of(row_bytes, out, in, indices);
}

at::Tensor gather(const at::Tensor& from, at::Tensor spare, at::IntArrayRef indices) {
  if (!from.is_cpu()) {
    return from.index_select(0, at::tensor(indices, at::kLong).to(from.device()));
  }
  c10::SmallVector<int64_t, 5> sizes(from.sizes().begin(), from.sizes().end());
  sizes[0] = static_cast<int64_t>(indices.size());
  at::Tensor to = reuse_or_empty(std::move(spare), sizes, from.scalar_type());
  const size_t row_bytes =
      from.size(0) == 0 ? 0 : from.nbytes() / static_cast<size_t>(from.size(0));
  if (row_bytes > 0) copy_rows(to.data_ptr(), from.const_data_ptr(), row_bytes, indices);
  return to;
}

std::string sizes_text(const at::Tensor& tensor) {
  return tensor.defined() ? fmt::format("[{}]", fmt::join(tensor.sizes(), ", ")) : "undefined";
}

}  // namespace

TensorDataset::TensorDataset(at::Tensor data, at::Tensor target) {
  if (!data.defined() || !target.defined() || data.dim() < 1 || target.dim() < 1 ||
      data.size(0) != target.size(0)) {
    throw ConfigError(fmt::format("{} data {} and target {} need the same first dimension",
                                  kTensors, sizes_text(data), sizes_text(target)));
  }
  // Rows are copied by address: no gradients, no gaps, no conjugation or negation to be done yet.
  const auto plain = [](const at::Tensor& tensor) {
    return tensor.detach().resolve_conj().resolve_neg().contiguous();
  };
  data_ = plain(data);
  target_ = plain(target);
}

Batch TensorDataset::refill(Batch spare, at::IntArrayRef indices) const {
  check_indices(kTensors, indices, size());
  return {gather(data_, std::move(spare.data), indices),
          gather(target_, std::move(spare.target), indices)};
}

}  // namespace lockstep::data
