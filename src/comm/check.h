// What a rank can check of a call's arguments by itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <string_view>
#include <utility>
#include <vector>

#include "comm/transport.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {

template <class... Args>
[[noreturn]] void refuse(Collective what, fmt::format_string<Args...> text, Args&&... args) {
  throw ConfigError(
      fmt::format("[comm] {}: {}", name_of(what), fmt::format(text, std::forward<Args>(args)...)));
}

// Of tensors that have a history, once a process: autograd does not follow what ranks do with them.
void warn_of_history(Collective what, const std::vector<at::Tensor>& tensors);
// Whether groups carry tensors of the dtype.
bool carried(at::ScalarType dtype);
// Throws unless it is defined, dense and of a dtype that is carried.
void check_tensor(Collective what, const at::Tensor& tensor);
// Throws unless it is on `device`, which the transport carries.
void check_device(Collective what, const at::Tensor& tensor, const Transport& transport,
                  at::Device device);
// Throws where the combination has no meaning for the dtype.
void check_reduction(Collective what, at::ScalarType dtype, ReduceOp op);
// Refuses an output whose elements share memory, and outputs of which two do. Of outputs with gaps
// and more than 4096 elements in all, it sees only the plain cases.
void check_outputs(Collective what, const std::vector<at::Tensor>& outputs);
// Copies inputs that share memory with an output, except one that is this rank's own part of it
// (see Group).
void separate(Request& request, int rank);
// `input`, or a copy where it shares memory with `output`.
at::Tensor separate(const at::Tensor& input, const at::Tensor& output);
// Throws where a group with Python ranks cannot make the call.
void check_for_python(Collective what, at::ScalarType dtype, ReduceOp op);
// Throws unless the group of `size` ranks has this one.
void check_rank(Collective what, int rank, int size);
// The arguments of Group::empty() and shared(), for memory that the transport carries.
void check_memory(std::string_view what, at::IntArrayRef sizes, const at::TensorOptions& options,
                  const Transport& transport);
// An explicit stream against where the tensors are, and what belongs to one reduction against the
// one that is made.
void check_options(Collective what, ReduceOp op, const CallOptions& options, at::Device device);

}  // namespace lockstep::comm
