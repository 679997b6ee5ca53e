#include "checkpoint/part_of.h"

#include <c10/core/TensorImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::checkpoint {
namespace {

// libtorch carries it with the tensor, and with its aliases.
struct Mark : c10::BackendMeta {
  explicit Mark(PartOf w) : whole(std::move(w)) {}
  PartOf whole;
};

}  // namespace

bool PartOf::is_within(std::vector<int> others) const {
  std::vector<int> mine = world_ranks;
  std::ranges::sort(mine);
  std::ranges::sort(others);
  return std::ranges::includes(others, mine);
}

void mark_part(const at::Tensor& leaf, PartOf whole) {
  leaf.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Mark>(std::move(whole)));
}

const PartOf* part_of(const at::Tensor& leaf) {
  const auto* mark = dynamic_cast<const Mark*>(leaf.unsafeGetTensorImpl()->get_backend_meta());
  return mark == nullptr ? nullptr : &mark->whole;
}

std::vector<Part> parts_of(const Sizes& all_sizes, const Sizes& strides, const Range& range,
                           const at::Tensor& values) {
  // Dimensions from the one that is furthest apart in memory to the one that is densest.
  std::vector<int64_t> order(all_sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  Sizes sizes;
  std::vector<int64_t> back(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    sizes.push_back(all_sizes[order[i]]);
    back[order[i]] = static_cast<int64_t>(i);
  }
  std::vector<Part> parts;
  int64_t place = 0;
  for (const auto& box : boxes_of(sizes, range)) {
    const int64_t count = elements(box.size);
    Part part{box, values.narrow(0, place, count).view(box.size).permute(back)};
    for (size_t i = 0; i < order.size(); ++i) {
      part.box.offset[order[i]] = box.offset[i];
      part.box.size[order[i]] = box.size[i];
    }
    place += count;
    parts.push_back(std::move(part));
  }
  return parts;
}

Piece part_piece(std::string name, const PartOf& whole, const at::Tensor& values) {
  return {std::move(name), values.scalar_type(), whole.sizes,
          parts_of(whole.sizes, whole.strides, whole.range, values.detach()), Held::InParts};
}

Piece piece_of_parameter(std::string name, const at::Tensor& parameter, const at::Tensor& values) {
  if (!values.defined()) {
    throw ConfigError(fmt::format("[checkpoint] {}: an undefined tensor: begin with zeros", name));
  }
  if (values.sizes() != parameter.sizes()) {
    throw ConfigError(fmt::format(
        "[checkpoint] {}: [{}] in the place of the parameter's [{}]: give an element for each of "
        "its elements; what is the same on all ranks, and no such part, is a whole_piece()",
        name, fmt::join(values.sizes(), ", "), fmt::join(parameter.sizes(), ", ")));
  }
  const PartOf* whole = part_of(parameter);
  if (whole == nullptr) return whole_piece(std::move(name), values);
  Piece piece = part_piece(std::move(name), *whole, values);
  piece.is_copy = !whole->saves;
  return piece;
}

}  // namespace lockstep::checkpoint
