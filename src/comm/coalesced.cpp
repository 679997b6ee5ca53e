// Several tensors in one call: the bytes of each dtype go together through one flat tensor.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <functional>

#include "comm/assign.h"
#include "comm/call.h"
#include "comm/check.h"
#include "lockstep/comm/group.h"

namespace lockstep::comm {
namespace {

using Tensors = std::vector<at::Tensor>;

// libtorch has no cat() for some dtypes, but for bytes. as_strided() also where the only element
// has another stride.
at::Tensor raw_bytes_of(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().resolve_conj().resolve_neg().contiguous();
  return dense.as_strided({dense.numel()}, {1}).view(at::kByte);
}

// The places of the list at which tensors of one dtype are; dtypes in the order in which they come.
std::vector<std::vector<size_t>> by_dtype(const Tensors& tensors) {
  std::vector<std::vector<size_t>> batches;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto found = std::find_if(batches.begin(), batches.end(), [&](const auto& batch) {
      return tensors[batch[0]].scalar_type() == tensors[i].scalar_type();
    });
    found == batches.end() ? batches.push_back({i}) : found->push_back(i);
  }
  return batches;
}

// `parts` one after another, `rounds` times over: in round r the r-th of as many equal parts of
// each.
at::Tensor flat_of(const Tensors& parts, int rounds) {
  Tensors pieces;
  for (int r = 0; r < rounds; ++r) {
    for (const at::Tensor& part : parts) {
      const at::Tensor bytes = raw_bytes_of(part);
      const int64_t each = bytes.numel() / rounds;
      pieces.push_back(bytes.narrow(0, r * each, each));
    }
  }
  return at::cat(pieces).view(parts[0].scalar_type());
}

// The reverse, into tensors of any strides.
void spread(const at::Tensor& flat, const Tensors& targets, int rounds) {
  const int64_t per_round = flat.numel() / rounds;
  int64_t offset = 0;
  for (const at::Tensor& target : targets) {
    const int64_t each = target.numel() / rounds;
    const at::Tensor rows =
        flat.view({rounds, per_round}).narrow(1, offset, each).reshape(target.sizes());
    assign(target.detach(), rows);
    offset += each;
  }
}

// The counts of what goes as one tensor, of a batch of the list; nothing for a single one.
std::vector<int64_t> parts_of(const Tensors& batch) {
  std::vector<int64_t> parts;
  for (size_t i = 0; batch.size() > 1 && i < batch.size(); ++i) parts.push_back(batch[i].numel());
  return parts;
}

// Of a call with one pair of flat tensors for each dtype; `rounds_in` and `rounds_out` say how its
// inputs and outputs are cut. In place where there are no inputs.
struct Shape {
  Collective what;
  int rounds_in = 1, rounds_out = 1;
  ReduceOp op = ReduceOp::Sum;
};

// All of them, before the first is sent.
void check(const Shape& shape, const Group& group, const Tensors& tensors,
           const CallOptions& options) {
  for (const at::Tensor& tensor : tensors) {
    check_tensor(shape.what, tensor);
    const at::ScalarType dtype = tensor.scalar_type();
    if (reduces(shape.what)) check_reduction(shape.what, dtype, shape.op);
    if (group.has_python_ranks()) check_for_python(shape.what, dtype, shape.op);
    check_device(shape.what, tensor, group.transport(), tensors[0].device());
    check_options(shape.what, shape.op, options, tensor.device());
  }
}

using Start = std::function<Work(const at::Tensor& output, const at::Tensor& input,
                                 std::vector<int64_t> parts)>;

Work coalesced(const Group& group, const Shape& shape, const Tensors& outputs,
               const Tensors& inputs, const CallOptions& options, const Start& start) {
  Tensors all = outputs;
  all.insert(all.end(), inputs.begin(), inputs.end());
  if (all.empty()) return {};
  check(shape, group, all, options);
  if (group.rank() == 0) warn_of_history(shape.what, all);
  const bool in_place = inputs.empty();
  // A tensor that is combined in place may be listed twice: both get the same result.
  if (in_place) {
    for (const at::Tensor& output : outputs) check_outputs(shape.what, {output});
  } else {
    check_outputs(shape.what, outputs);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const int64_t in = inputs[i].numel() * shape.rounds_out,
                  out = outputs[i].numel() * shape.rounds_in;
    if (in != out || inputs[i].scalar_type() != outputs[i].scalar_type()) {
      refuse(shape.what, "input {} of the list has {} elements of {}, output {} of {}", i,
             inputs[i].numel(), name_of(inputs[i].scalar_type()), outputs[i].numel(),
             name_of(outputs[i].scalar_type()));
    }
  }
  const Uses uses = uses_of(inputs, outputs);
  finish_dropped(group.transport(), uses);
  std::optional<c10::StreamGuard> current;
  if (options.stream) current.emplace(*options.stream);
  std::vector<Work> works;
  std::vector<std::pair<at::Tensor, Tensors>> results;
  for (const auto& batch : by_dtype(outputs)) {
    Tensors out, in;
    for (const size_t i : batch) {
      out.push_back(outputs[i]);
      if (!in_place) in.push_back(inputs[i]);
    }
    const at::Tensor from = flat_of(in_place ? out : in, shape.rounds_in);
    const at::Tensor to =
        in_place ? from
                 : at::empty({from.numel() * shape.rounds_out / shape.rounds_in}, from.options());
    works.push_back(start(to, from, parts_of(shape.rounds_out > 1 ? in : out)));
    results.emplace_back(to, std::move(out));
  }
  return together(group.transport(), uses, std::move(works), options.stream,
                  [results = std::move(results), rounds = shape.rounds_out] {
                    for (const auto& [flat, targets] : results) spread(flat, targets, rounds);
                  });
}

// A list of one needs no copy.
bool is_one(const Tensors& tensors) { return tensors.size() == 1; }

void check_lists(Collective what, const Tensors& outputs, const Tensors& inputs) {
  if (outputs.size() == inputs.size()) return;
  refuse(what, "{} outputs for {} inputs", outputs.size(), inputs.size());
}

}  // namespace

Work Group::all_reduce(const std::vector<at::Tensor>& tensors, ReduceOp op,
                       const CallOptions& options) const {
  constexpr Collective kWhat = Collective::AllReduce;
  if (is_one(tensors)) return all_reduce(tensors[0], op, options);
  return coalesced(*this, {.what = kWhat, .op = op}, tensors, {}, options,
                   [&](const at::Tensor& to, const at::Tensor&, std::vector<int64_t> parts) {
                     return start(
                         {.what = kWhat, .outputs = {to}, .op = op, .parts = std::move(parts)},
                         options);
                   });
}

Work Group::broadcast(const std::vector<at::Tensor>& tensors, int root,
                      const CallOptions& options) const {
  constexpr Collective kWhat = Collective::Broadcast;
  if (is_one(tensors)) return broadcast(tensors[0], root, options);
  return coalesced(*this, {kWhat}, tensors, {}, options,
                   [&](const at::Tensor& to, const at::Tensor&, std::vector<int64_t> parts) {
                     return start(
                         {.what = kWhat, .outputs = {to}, .peer = root, .parts = std::move(parts)},
                         options);
                   });
}

Work Group::all_gather(const std::vector<at::Tensor>& outputs,
                       const std::vector<at::Tensor>& inputs, const CallOptions& options) const {
  constexpr Collective kWhat = Collective::AllGather;
  check_lists(kWhat, outputs, inputs);
  if (is_one(outputs)) return all_gather(outputs[0], inputs[0], options);
  return coalesced(
      *this, {kWhat, 1, size()}, outputs, inputs, options,
      [&](const at::Tensor& to, const at::Tensor& from, std::vector<int64_t> parts) {
        return start({.what = kWhat, .inputs = {from}, .outputs = {to}, .parts = std::move(parts)},
                     options);
      });
}

Work Group::reduce_scatter(const std::vector<at::Tensor>& outputs,
                           const std::vector<at::Tensor>& inputs, ReduceOp op,
                           const CallOptions& options) const {
  constexpr Collective kWhat = Collective::ReduceScatter;
  check_lists(kWhat, outputs, inputs);
  if (is_one(outputs)) return reduce_scatter(outputs[0], inputs[0], op, options);
  return coalesced(
      *this, {kWhat, size(), 1, op}, outputs, inputs, options,
      [&](const at::Tensor& to, const at::Tensor& from, std::vector<int64_t> parts) {
        return start(
            {.what = kWhat, .inputs = {from}, .outputs = {to}, .op = op, .parts = std::move(parts)},
            options);
      });
}

}  // namespace lockstep::comm
