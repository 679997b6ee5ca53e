#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "lockstep/models/transformer.h"
#include "lockstep/parallel/call.h"

namespace lockstep::rl {

// What `part` makes of net->hidden(ids), within the net's call: under Fsdp its head has memory only
// there.
inline std::vector<at::Tensor> with_hidden(
    models::Transformer& net, const at::Tensor& ids,
    const std::function<std::vector<at::Tensor>(const at::Tensor& hidden)>& part) {
  return parallel::detail::run_layers(*net, {ids}, [&](const std::vector<at::Tensor>& inputs) {
    return part(net->hidden(inputs[0]));
  });
}

}  // namespace lockstep::rl
