// Tensors over a device's memory that no allocator knows.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace lockstep::comm {

// `release` gets `memory` when the tensor is gone and the device has done all that was enqueued
// before: kernels may still use it then, and nothing else orders its reuse after them. While a
// stream captures a CUDA graph, which that would invalidate, it is put off. Not in a process that
// was forked since, nor where the device has failed.
at::Tensor tensor_over(void* memory, at::IntArrayRef sizes, const at::TensorOptions& options,
                       std::function<void(void*)> release);

// What was put off, outside of captures; where there is nothing, at no cost.
void release_put_off();

}  // namespace lockstep::comm
