#include "checkpoint/format/tensor_files/gather.h"

#include <cstring>

namespace lockstep::checkpoint {
namespace {

// Elements of `sizes`, from one set of strides to another (in bytes), dimension `d` and those
// after.
void copy(const Sizes& sizes, const Sizes& from_strides, const Sizes& to_strides, size_t d,
          int64_t element_bytes, const char* from, char* to) {
  if (d == sizes.size()) {
    std::memcpy(to, from, element_bytes);
    return;
  }
  if (d + 1 == sizes.size() && from_strides[d] == element_bytes && to_strides[d] == element_bytes) {
    std::memcpy(to, from, sizes[d] * element_bytes);
    return;
  }
  for (int64_t i = 0; i < sizes[d]; ++i) {
    copy(sizes, from_strides, to_strides, d + 1, element_bytes, from + i * from_strides[d],
         to + i * to_strides[d]);
  }
}

Sizes times(Sizes strides, int64_t bytes) {
  for (auto& stride : strides) stride *= bytes;
  return strides;
}

// The last dimensions that lie one after the other on both sides, as one.
void join_last(Sizes& sizes, Sizes& a, Sizes& b) {
  while (sizes.size() > 1) {
    const size_t last = sizes.size() - 1;
    if (a[last - 1] != a[last] * sizes[last] || b[last - 1] != b[last] * sizes[last]) return;
    sizes[last - 1] *= sizes[last];
    a[last - 1] = a[last];
    b[last - 1] = b[last];
    for (Sizes* list : {&sizes, &a, &b}) list->pop_back();
  }
}

void copy(Sizes sizes, Sizes from_strides, Sizes to_strides, int64_t element_bytes,
          const char* from, char* to) {
  if (elements(sizes) == 0) return;
  join_last(sizes, from_strides, to_strides);
  copy(sizes, from_strides, to_strides, 0, element_bytes, from, to);
}

}  // namespace

Sizes row_major(const Sizes& sizes) {
  Sizes strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * sizes[d];
  return strides;
}

void put_box(const Sizes& sizes, const Box& box, int64_t element_bytes, std::string_view from,
             char* to) {
  const Sizes strides = times(row_major(sizes), element_bytes);
  for (size_t d = 0; d < sizes.size(); ++d) to += box.offset[d] * strides[d];
  copy(box.size, times(row_major(box.size), element_bytes), strides, element_bytes, from.data(),
       to);
}

void gather(const Sizes& sizes, const Sizes& strides, int64_t element_bytes, const char* first,
            char* to) {
  copy(sizes, times(strides, element_bytes), times(row_major(sizes), element_bytes), element_bytes,
       first, to);
}

}  // namespace lockstep::checkpoint
