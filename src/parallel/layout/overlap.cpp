#include "parallel/layout/overlap.h"

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <unordered_set>

namespace lockstep::parallel {
namespace {

// Where a tensor lies. Without memory, as under DeferredInit, it has a place in its storage only.
struct Extent {
  int device;
  const void* storage;
  uintptr_t begin, end;
  size_t index;

  bool is_before(const Extent& other) const {
    return std::tie(device, storage, begin) < std::tie(other.device, other.storage, other.begin);
  }
  bool reaches(const Extent& other) const {
    return device == other.device && storage == other.storage && end > other.begin;
  }
};

Extent extent_of(const at::Tensor& tensor, size_t index) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  // Of a storage without memory any other access would throw.
  const auto memory = reinterpret_cast<uintptr_t>(storage->_mutable_data_ptr_no_checks().get());
  const uintptr_t begin = memory + tensor.storage_offset() * tensor.element_size();
  return {tensor.is_cpu() ? -1 : static_cast<int>(tensor.device().index()),
          memory == 0 ? storage : nullptr, begin, begin + tensor.nbytes(), index};
}

}  // namespace

std::optional<std::pair<size_t, size_t>> first_overlap(const std::vector<at::Tensor>& tensors,
                                                       size_t moved) {
  std::vector<Extent> extents;
  std::unordered_set<const at::TensorImpl*> met;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.numel() == 0) continue;
    if (!tensor.has_storage() || !tensor.is_non_overlapping_and_dense()) continue;
    if (met.insert(tensor.unsafeGetTensorImpl()).second) extents.push_back(extent_of(tensor, i));
  }
  std::ranges::sort(extents, [](const Extent& a, const Extent& b) { return a.is_before(b); });
  // What reaches furthest of those before, of all and of those that move.
  const Extent *furthest = nullptr, *furthest_moved = nullptr;
  const auto extend = [](const Extent*& reached, const Extent& extent) {
    const bool is_within = reached != nullptr && reached->reaches(extent);
    if (!is_within || extent.end > reached->end) reached = &extent;
  };
  for (const Extent& extent : extents) {
    const Extent* other = extent.index < moved ? furthest : furthest_moved;
    if (other != nullptr && other->reaches(extent)) {
      return std::pair<size_t, size_t>(std::minmax(other->index, extent.index));
    }
    extend(furthest, extent);
    if (extent.index < moved) extend(furthest_moved, extent);
  }
  return std::nullopt;
}

}  // namespace lockstep::parallel
