// Elements that lie apart, brought into row-major order.
#pragma once

#include <string_view>

#include "lockstep/checkpoint/box.h"

namespace lockstep::checkpoint {

// Copies a box's bytes, row-major in `from`, to its place in a tensor of `sizes`.
void put_box(const Sizes& sizes, const Box& box, int64_t element_bytes, std::string_view from,
             char* to);

// Copies the elements of a tensor with `strides` (in elements; 0 and more) from `first` on.
void gather(const Sizes& sizes, const Sizes& strides, int64_t element_bytes, const char* first,
            char* to);

// Strides of a row-major tensor.
Sizes row_major(const Sizes& sizes);

}  // namespace lockstep::checkpoint
