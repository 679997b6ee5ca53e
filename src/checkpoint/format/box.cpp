#include "lockstep/checkpoint/box.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/divided_up.h"

namespace lockstep::checkpoint {
namespace {

// Adds the boxes of `range` within the dimensions from `first` on; those before are fixed in `box`.
void add_boxes(const Sizes& sizes, size_t first, const Range& range, Box box,
               std::vector<Box>& boxes) {
  if (range.size() <= 0) return;
  if (first == sizes.size()) {
    boxes.push_back(std::move(box));
    return;
  }
  const int64_t row =
      std::accumulate(sizes.begin() + first + 1, sizes.end(), int64_t{1}, std::multiplies<>());
  const auto add_row = [&](int64_t index, int64_t begin, int64_t end) {
    Box inner = box;
    inner.offset[first] = index;
    inner.size[first] = 1;
    add_boxes(sizes, first + 1, {begin, end}, std::move(inner), boxes);
  };
  const int64_t begin = divided_up(range.begin, row),
                end = range.end / row;  // rows that are whole
  if (begin > end) return add_row(end, range.begin - end * row, range.end - end * row);
  if (begin * row > range.begin) add_row(begin - 1, range.begin - (begin - 1) * row, row);
  if (end > begin) {
    Box rows = box;
    rows.offset[first] = begin;
    rows.size[first] = end - begin;
    boxes.push_back(std::move(rows));
  }
  if (end * row < range.end) add_row(end, 0, range.end - end * row);
}

}  // namespace

int64_t elements(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

Box whole(const Sizes& sizes) { return {Sizes(sizes.size(), 0), sizes}; }

bool is_inside(const Sizes& sizes, const Box& box) {
  if (box.offset.size() != sizes.size() || box.size.size() != sizes.size()) return false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (box.offset[d] < 0 || box.size[d] < 0 || box.offset[d] > sizes[d] ||
        box.size[d] > sizes[d] - box.offset[d]) {
      return false;
    }
  }
  return true;
}

std::optional<Box> intersection(const Box& a, const Box& b) {
  Box common = a;
  for (size_t d = 0; d < a.offset.size(); ++d) {
    common.offset[d] = std::max(a.offset[d], b.offset[d]);
    common.size[d] = std::min(a.offset[d] + a.size[d], b.offset[d] + b.size[d]) - common.offset[d];
    if (common.size[d] <= 0) return std::nullopt;
  }
  return common;
}

std::vector<Box> boxes_of(const Sizes& sizes, const Range& range) {
  std::vector<Box> boxes;
  add_boxes(sizes, 0, range, whole(sizes), boxes);
  return boxes;
}

std::string fault_of(const Sizes& sizes, const std::vector<Box>& boxes) {
  int64_t count = 0;
  for (const auto& box : boxes) {
    if (!is_inside(sizes, box)) return text_of(box) + " lies outside";
    count += elements(box.size);  // cannot overflow before an overlap is found below
    if (count > elements(sizes)) return "its parts hold more elements than it has";
  }
  if (count < elements(sizes)) return fmt::format("{} of {} elements", count, elements(sizes));
  if (sizes.empty() || count == 0) return "";
  std::vector<const Box*> sorted;
  for (const auto& box : boxes) {
    if (elements(box.size) > 0) sorted.push_back(&box);
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const Box* a, const Box* b) { return a->offset < b->offset; });
  std::vector<const Box*> open;  // that reach beyond the current first coordinate
  for (const Box* box : sorted) {
    std::erase_if(open,
                  [box](const Box* o) { return o->offset[0] + o->size[0] <= box->offset[0]; });
    for (const Box* other : open) {
      if (intersection(*other, *box)) return text_of(*box) + " overlaps " + text_of(*other);
    }
    open.push_back(box);
  }
  return "";
}

std::string text_of(const Box& box) {
  std::string text = "[";
  for (size_t d = 0; d < box.offset.size(); ++d) {
    text += fmt::format("{}{}:{}", d == 0 ? "" : ", ", box.offset[d],
                        d < box.size.size() ? box.offset[d] + box.size[d] : -1);
  }
  return text + "]";
}

}  // namespace lockstep::checkpoint
