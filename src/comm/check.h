// What a rank can check of a call's arguments by itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "comm/transport.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {

template <class... Args>
[[noreturn]] void refuse(Collective what, fmt::format_string<Args...> text, Args&&... args) {
  throw ConfigError(
      fmt::format("[comm] {}: {}", name_of(what), fmt::format(text, std::forward<Args>(args)...)));
}

// Defined, dense and of a dtype that is carried.
void check_tensor(Collective what, const at::Tensor& tensor);
// On `device`, which the transport carries.
void check_device(Collective what, const at::Tensor& tensor, const Transport& transport,
                  at::Device device);
// Whether the combination has a meaning for the dtype.
void check_reduction(Collective what, at::ScalarType dtype, ReduceOp op);
// Whether Python ranks can take part.
void check_for_python(Collective what, at::ScalarType dtype, ReduceOp op);
// An explicit stream against where the tensors are.
void check_stream(Collective what, const CallOptions& options, at::Device device);

}  // namespace lockstep::comm
