#include "lockstep/comm/group.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "comm/call.h"
#include "comm/check.h"
#include "comm/text.h"
#include "comm/transport.h"
#include "core/time_limit.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// The string's bytes as a tensor that shares them.
at::Tensor as_tensor(std::string_view text) {
  return at::from_blob(const_cast<char*>(text.data()), {static_cast<int64_t>(text.size())},
                       at::kByte);
}

// What `make` makes. Libtorch's errors, as of too little memory, become the library's.
template <class Make>
at::Tensor made(std::string_view what, const at::TensorOptions& options, const Make& make) {
  try {
    at::Tensor memory = make();
    if (memory.defined() && options.requires_grad()) memory.set_requires_grad(true);
    return memory;
  } catch (const c10::Error& error) {
    throw CommError(fmt::format("[comm] {}: {}", what, first_line(error)));
  }
}

}  // namespace

Group::Group() : transport_(make_solo_transport()) {}
Group::Group(std::shared_ptr<Transport> transport)
    : transport_(not_for_children(std::move(transport))) {}

int Group::rank() const { return transport_->rank(); }
int Group::size() const { return transport_->size(); }
std::string_view Group::backend() const { return transport_->name(); }
bool Group::deterministic() const { return transport_->deterministic(); }
bool Group::carries(at::Device device) const { return transport_->carries(device); }
std::chrono::milliseconds Group::timeout() const { return transport_->timeout(); }
uint32_t Group::next_caller() const { return transport_->next_caller(); }
std::vector<int> Group::world_ranks() const { return transport_->world_ranks(); }

std::optional<int> Group::rank_in(const Group& other, int rank) const {
  const std::vector<int> mine = world_ranks(), theirs = other.world_ranks();
  if (rank < 0 || rank >= size())
    throw ConfigError(
        fmt::format("[comm] rank_in: rank {} is not in this group of {}", rank, size()));
  const auto found = std::find(theirs.begin(), theirs.end(), mine[static_cast<size_t>(rank)]);
  if (found == theirs.end()) return std::nullopt;
  return static_cast<int>(found - theirs.begin());
}

void Group::abort(std::string_view why) const noexcept {
  if (!transport_->unfinished()->is_here()) return;
  try {
    transport_->abort(fmt::format("the group was aborted: {}", why));
  } catch (const std::exception&) {
    transport_->abort("the group was aborted");
  }
}

std::optional<std::string> Group::failure() const {
  if (!transport_->unfinished()->is_here()) return transport_->unfinished()->refusal();
  if (const auto why = transport_->aborted()) return why;
  return transport_->failure();
}

// Checks what this rank alone can check.
Work Group::start(Request request, const CallOptions& options) const {
  transport_->unfinished()->check_process(name_of(request.what));
  if (const auto why = transport_->aborted())
    throw CommError(fmt::format("[comm] {}: {}", name_of(request.what), *why));
  request.timeout = bounded(options.timeout.value_or(transport_->timeout()));
  if (!options.label.empty()) request.label = options.label;
  if (!options.context.name.empty()) request.context.name = options.context.name;
  request.context.number = options.context.number;
  request.context.pass = options.context.pass;
  if (!options.advice.empty()) request.advice = options.advice;
  request.divide_by = options.divide_by;
  request.factor = options.factor;
  check_rank(request.what, request.peer, size());
  const at::ScalarType dtype = request.dtype();
  const at::Device device = !request.outputs.empty()  ? request.outputs.front().device()
                            : !request.inputs.empty() ? request.inputs.front().device()
                                                      : at::Device(at::kCPU);
  for (const auto* tensors : {&request.inputs, &request.outputs}) {
    for (const at::Tensor& tensor : *tensors) {
      check_tensor(request.what, tensor);
      check_device(request.what, tensor, *transport_, device);
      if (tensor.scalar_type() != dtype) {
        refuse(request.what, "tensors of {} and {} in one call", name_of(dtype),
               name_of(tensor.scalar_type()));
      }
    }
  }
  if (rank() == 0) {
    warn_of_history(request.what, request.inputs);
    warn_of_history(request.what, request.outputs);
  }
  if (has_python_ranks()) check_for_python(request.what, dtype, request.op);
  if (request.divide_by != 0 && (request.divide_by < 0 || !device.is_cpu() || has_python_ranks())) {
    refuse(
        request.what,
        "divide_by = {}: a number above 0, for tensors on the CPU, in a group without Python ranks",
        request.divide_by);
  }
  check_options(request.what, request.op, options, device);
  check_outputs(request.what, request.outputs);
  // autograd refuses a backward() that needs what was in an output before.
  for (const at::Tensor& output : request.outputs) {
    if (!output.is_inference()) output.unsafeGetTensorImpl()->bump_version();
  }
  return start_call(*transport_, std::move(request), options.stream);
}

Work Group::all_reduce(const at::Tensor& tensor, ReduceOp op, const CallOptions& options) const {
  check_tensor(Collective::AllReduce, tensor);
  check_reduction(Collective::AllReduce, tensor.scalar_type(), op);
  return start({.what = Collective::AllReduce, .outputs = {tensor}, .op = op}, options);
}

Work Group::reduce(const at::Tensor& tensor, int root, ReduceOp op,
                   const CallOptions& options) const {
  check_tensor(Collective::Reduce, tensor);
  check_reduction(Collective::Reduce, tensor.scalar_type(), op);
  return start({.what = Collective::Reduce, .outputs = {tensor}, .op = op, .peer = root}, options);
}

Work Group::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                           const CallOptions& options) const {
  check_tensor(Collective::ReduceScatter, output);
  check_tensor(Collective::ReduceScatter, input);
  check_reduction(Collective::ReduceScatter, output.scalar_type(), op);
  if (input.numel() != size() * output.numel()) {
    refuse(Collective::ReduceScatter, "input has {} elements, output {}: {} ranks need {}",
           input.numel(), output.numel(), size(), size() * output.numel());
  }
  return start(
      {.what = Collective::ReduceScatter, .inputs = {input}, .outputs = {output}, .op = op},
      options);
}

Work Group::reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                           ReduceOp op, const CallOptions& options) const {
  check_tensor(Collective::ReduceScatter, output);
  check_reduction(Collective::ReduceScatter, output.scalar_type(), op);
  check_list(Collective::ReduceScatter, inputs);
  if (inputs[rank()].numel() != output.numel()) {
    refuse(Collective::ReduceScatter, "output has {} elements, this rank's part of the inputs {}",
           output.numel(), inputs[rank()].numel());
  }
  return start({.what = Collective::ReduceScatter, .inputs = inputs, .outputs = {output}, .op = op},
               options);
}

Work Group::all_gather(const at::Tensor& output, const at::Tensor& input,
                       const CallOptions& options) const {
  check_tensor(Collective::AllGather, output);
  check_tensor(Collective::AllGather, input);
  if (output.numel() != size() * input.numel()) {
    refuse(Collective::AllGather, "output has {} elements, input {}: {} ranks need {}",
           output.numel(), input.numel(), size(), size() * input.numel());
  }
  return start({.what = Collective::AllGather, .inputs = {input}, .outputs = {output}}, options);
}

Work Group::all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                       const CallOptions& options) const {
  check_tensor(Collective::AllGather, input);
  check_list(Collective::AllGather, outputs);
  if (outputs[rank()].numel() != input.numel()) {
    refuse(Collective::AllGather, "input has {} elements, this rank's output {}", input.numel(),
           outputs[rank()].numel());
  }
  return start({.what = Collective::AllGather, .inputs = {input}, .outputs = outputs}, options);
}

Work Group::broadcast(const at::Tensor& tensor, int root, const CallOptions& options) const {
  check_tensor(Collective::Broadcast, tensor);
  return start({.what = Collective::Broadcast, .outputs = {tensor}, .peer = root}, options);
}

Work Group::gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int root,
                   const CallOptions& options) const {
  check_tensor(Collective::Gather, input);
  if (rank() == root) {
    check_list(Collective::Gather, outputs);
    if (outputs[root].numel() != input.numel()) {
      refuse(Collective::Gather, "the root's input has {} elements, its output {}", input.numel(),
             outputs[root].numel());
    }
  } else if (!outputs.empty()) {
    refuse(Collective::Gather, "only the root, rank {}, gives outputs", root);
  }
  return start({.what = Collective::Gather, .inputs = {input}, .outputs = outputs, .peer = root},
               options);
}

Work Group::scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root,
                    const CallOptions& options) const {
  check_tensor(Collective::Scatter, output);
  if (rank() == root) {
    check_list(Collective::Scatter, inputs);
    if (inputs[root].numel() != output.numel()) {
      refuse(Collective::Scatter, "the root's output has {} elements, its input {}", output.numel(),
             inputs[root].numel());
    }
  } else if (!inputs.empty()) {
    refuse(Collective::Scatter, "only the root, rank {}, gives inputs", root);
  }
  return start({.what = Collective::Scatter, .inputs = inputs, .outputs = {output}, .peer = root},
               options);
}

Work Group::all_to_all(const at::Tensor& output, const at::Tensor& input,
                       const CallOptions& options) const {
  check_tensor(Collective::AllToAll, output);
  check_tensor(Collective::AllToAll, input);
  if (output.numel() != input.numel() || input.numel() % size() != 0) {
    refuse(Collective::AllToAll,
           "input has {} elements, output {}: need equal counts that {} ranks divide",
           input.numel(), output.numel(), size());
  }
  return start({.what = Collective::AllToAll, .inputs = {input}, .outputs = {output}}, options);
}

Work Group::all_to_all(const std::vector<at::Tensor>& outputs,
                       const std::vector<at::Tensor>& inputs, const CallOptions& options) const {
  check_list(Collective::AllToAll, outputs);
  check_list(Collective::AllToAll, inputs);
  if (outputs[rank()].numel() != inputs[rank()].numel()) {
    refuse(Collective::AllToAll,
           "the part that stays here has {} elements in inputs, {} in outputs",
           inputs[rank()].numel(), outputs[rank()].numel());
  }
  return start({.what = Collective::AllToAll, .inputs = inputs, .outputs = outputs}, options);
}

Work Group::send(const at::Tensor& tensor, int to, int tag, const CallOptions& options) const {
  check_tensor(Collective::Send, tensor);
  if (to == rank()) refuse(Collective::Send, "rank {} sends to itself", to);
  return start({.what = Collective::Send, .inputs = {tensor}, .peer = to, .tag = tag}, options);
}

Work Group::recv(const at::Tensor& tensor, int from, int tag, const CallOptions& options) const {
  check_tensor(Collective::Recv, tensor);
  if (from == rank()) refuse(Collective::Recv, "rank {} receives from itself", from);
  return start({.what = Collective::Recv, .outputs = {tensor}, .peer = from, .tag = tag}, options);
}

Work Group::send_recv(const at::Tensor& output, const at::Tensor& input, const SendRecv& peers,
                      const CallOptions& options) const {
  if ((peers.to == rank()) != (peers.from == rank())) {
    refuse(Collective::Send, "send_recv to rank {} and from rank {}: this rank is both or neither",
           peers.to, peers.from);
  }
  check_tensor(Collective::Recv, output);
  check_tensor(Collective::Send, input);
  check_outputs(Collective::Recv, {output});
  for (const int peer : {peers.to, peers.from}) check_rank(Collective::Send, peer, size());
  // Before anything is sent.
  check_device(Collective::Recv, output, *transport_, output.device());
  check_options(Collective::Recv, ReduceOp::Sum, options, output.device());
  if (has_python_ranks()) check_for_python(Collective::Recv, output.scalar_type(), ReduceOp::Sum);
  if (peers.to != rank()) {
    const Uses uses = uses_of({input}, {output});
    finish_dropped(*transport_, uses);
    Work sent = send(separate(input, output), peers.to, peers.tag, options);
    return together(*transport_, uses,
                    {std::move(sent), recv(output, peers.from, peers.tag, options)},
                    options.stream);
  }
  if (output.numel() != input.numel() || output.scalar_type() != input.scalar_type()) {
    refuse(Collective::Recv, "send_recv within rank {}: output and input differ", rank());
  }
  return copy_alone(*transport_, output, input, options.stream);
}

Work Group::barrier(const CallOptions& options) const {
  return start({.what = Collective::Barrier}, options);
}

void Group::check_list(Collective what, const std::vector<at::Tensor>& tensors) const {
  if (static_cast<int>(tensors.size()) != size()) {
    refuse(what, "a list of {} tensors for {} ranks", tensors.size(), size());
  }
  for (const at::Tensor& tensor : tensors) check_tensor(what, tensor);
}

std::vector<std::string> Group::all_gather_bytes(std::string_view mine,
                                                 const CallOptions& options) const {
  at::Tensor lengths = at::empty({size()}, at::kLong);
  all_gather(lengths, at::full({1}, static_cast<int64_t>(mine.size()), at::kLong), options).wait();
  std::vector<std::string> all(size());
  std::vector<at::Tensor> parts;
  for (int r = 0; r < size(); ++r) {
    all[r].resize(lengths.const_data_ptr<int64_t>()[r]);
    parts.push_back(as_tensor(all[r]));
  }
  all_gather(parts, as_tensor(mine), options).wait();
  return all;
}

std::vector<std::string> Group::gather_bytes(std::string_view mine, int root,
                                             const CallOptions& options) const {
  check_rank(Collective::Gather, root, size());  // before the first of the two calls
  const bool is_root = rank() == root;
  at::Tensor lengths = at::empty({size()}, at::kLong);
  all_gather(lengths, at::full({1}, static_cast<int64_t>(mine.size()), at::kLong), options).wait();
  std::vector<std::string> all(is_root ? size() : 0);
  std::vector<at::Tensor> parts;
  for (size_t r = 0; r < all.size(); ++r) {
    all[r].resize(lengths.const_data_ptr<int64_t>()[r]);
    parts.push_back(as_tensor(all[r]));
  }
  gather(parts, as_tensor(mine), root, options).wait();
  return all;
}

std::string Group::broadcast_bytes(std::string_view mine, int root,
                                   const CallOptions& options) const {
  at::Tensor length = at::full({1}, static_cast<int64_t>(mine.size()), at::kLong);
  broadcast(length, root, options).wait();
  std::string text(rank() == root ? mine : std::string_view());
  text.resize(length.item<int64_t>());
  broadcast(as_tensor(text), root, options).wait();
  return text;
}

at::Tensor Group::empty(at::IntArrayRef sizes, at::TensorOptions options) const {
  check_memory("empty", sizes, options, *transport_);
  finish_dropped(*transport_);
  return made("empty", options, [&] { return transport_->empty(sizes, options); });
}

at::Tensor Group::shared(at::IntArrayRef sizes, at::TensorOptions options) const {
  check_memory("shared", sizes, options, *transport_);
  finish_dropped(*transport_);
  return made("shared", options, [&] { return transport_->shared(sizes, options); });
}

bool Group::has_python_ranks() const { return transport_->has_python_ranks(); }

void Group::refuse_python_ranks(std::string_view who) const {
  if (!has_python_ranks()) return;
  throw ConfigError(
      fmt::format("[{}] {} works among ranks that run Lockstep, and this group has Python ranks, "
                  "which would not make its calls: let all "
                  "ranks call the group's collectives, as all_reduce for gradients",
                  backend(), who));
}

}  // namespace lockstep::comm
