// c10d's tensors and reductions as comm::Group takes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "c10d/driver.h"
#include "lockstep/comm/group.h"

namespace lockstep::c10d_backend {

// The same memory as a dtype that Group carries, for calls that combine nothing. Throws
// c10::ValueError for a conjugate that libtorch has put off: its memory holds other numbers.
at::Tensor plain(const at::Tensor& tensor);
std::vector<at::Tensor> plain(const std::vector<at::Tensor>& tensors);
// The same, or a copy of such a conjugate, which is only read.
at::Tensor plain_input(const at::Tensor& tensor);
std::vector<at::Tensor> plain_inputs(const std::vector<at::Tensor>& tensors);

// How c10d's reduction is had from one of Group's.
struct Reduction {
  comm::ReduceOp op = comm::ReduceOp::Sum;
  double factor = 1;  // of PreMulSum
};
// Throws c10::ValueError for one that has no meaning for the dtype.
Reduction reduction_of(const ::c10d::ReduceOp& op, at::ScalarType dtype);

// The tensor that Group combines, sharing memory: complex numbers as pairs. Throws as plain() does.
at::Tensor summand(const at::Tensor& tensor);
// The same of a tensor that is only read: a copy of such a conjugate.
at::Tensor input_summand(const at::Tensor& input);
comm::CallOptions options_of(const Reduction& reduction, milliseconds timeout);

// Stages that combine `tensor` in place over all ranks, or onto `root` only.
std::vector<Stage> all_reduce_stages(const comm::Group& group, const at::Tensor& tensor,
                                     const Reduction& reduction, milliseconds timeout);
std::vector<Stage> reduce_stages(const comm::Group& group, const at::Tensor& tensor, int root,
                                 const Reduction& reduction, milliseconds timeout);
std::vector<Stage> reduce_scatter_stages(const comm::Group& group, const at::Tensor& output,
                                         const std::vector<at::Tensor>& inputs,
                                         const Reduction& reduction, milliseconds timeout);
// The sum of sparse tensors, coalesced, as gathered indices and values.
std::vector<Stage> sparse_stages(const comm::Group& group, const at::Tensor& tensor,
                                 milliseconds timeout);

}  // namespace lockstep::c10d_backend
