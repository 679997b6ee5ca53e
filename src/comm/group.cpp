#include "lockstep/comm/group.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>

#include <algorithm>

#include "comm/call.h"
#include "comm/transport.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

template <class... Args>
[[noreturn]] void refuse(Collective what, fmt::format_string<Args...> text, Args&&... args) {
  throw ConfigError(
      fmt::format("[comm] {}: {}", name_of(what), fmt::format(text, std::forward<Args>(args)...)));
}

bool carried(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kByte:
    case at::kBool:
      return true;
    default:
      return false;
  }
}

void check_tensor(Collective what, const at::Tensor& tensor) {
  if (!tensor.defined()) refuse(what, "a tensor is undefined");
  if (!carried(tensor.scalar_type())) {
    refuse(what,
           "dtype {} is not supported; use float32/64, float16, bfloat16, int8/16/32/64, uint8 or "
           "bool",
           name_of(tensor.scalar_type()));
  }
  if (tensor.layout() != at::kStrided) refuse(what, "a tensor is not dense: use .to_dense()");
}

void check_device(Collective what, const at::Tensor& tensor, const Transport& transport,
                  at::Device device) {
  if (!transport.carries(tensor.device())) {
    const at::Device own = transport.device();
    refuse(what,
           "a tensor is on {}, but this group communicates between {} tensors: move it with .{}",
           tensor.device().str(), own.is_cpu() ? "CPU" : own.str() + " and CPU",
           own.is_cpu() ? "cpu()" : fmt::format("to({})", own.str()));
  }
  if (tensor.device() != device) {
    refuse(what, "tensors on {} and {} in one call", device.str(), tensor.device().str());
  }
}

void check_reduction(Collective what, at::ScalarType dtype, ReduceOp op) {
  const bool bitwise = op == ReduceOp::BitwiseAnd || op == ReduceOp::BitwiseOr;
  if ((bitwise && at::isFloatingType(dtype)) || (op == ReduceOp::Average && dtype == at::kBool)) {
    refuse(what, "{} has no meaning for {}", name_of(op), name_of(dtype));
  }
}

// The string's bytes as a tensor that shares them.
at::Tensor as_tensor(std::string_view text) {
  return at::from_blob(const_cast<char*>(text.data()), {static_cast<int64_t>(text.size())},
                       at::kByte);
}

void check_memory(std::string_view what, const at::TensorOptions& options,
                  const Transport& transport) {
  if (transport.carries(options.device())) return;
  throw ConfigError(fmt::format(
      "[comm] {}: this group's memory is on {}, not on {}", what,
      transport.device().is_cpu() ? "the CPU" : transport.device().str() + " and the CPU",
      options.device().str()));
}

// What each rank says in split().
struct Choice {
  int color;
  int key;
};

}  // namespace

Group::Group() : transport_(make_solo_transport()) {}
Group::Group(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}

int Group::rank() const { return transport_->rank(); }
int Group::size() const { return transport_->size(); }
std::string_view Group::backend() const { return transport_->name(); }
bool Group::keeps_tree_order() const { return transport_->keeps_tree_order(); }
bool Group::carries(at::Device device) const { return transport_->carries(device); }
std::chrono::milliseconds Group::timeout() const { return transport_->timeout(); }
uint32_t Group::next_caller() const { return transport_->next_caller(); }

// Checks what this rank alone can check.
Work Group::start(Request request, const CallOptions& options) const {
  // A deadline that far off is none; more would overflow the clock.
  request.timeout = std::min<std::chrono::milliseconds>(
      options.timeout.value_or(transport_->timeout()), std::chrono::years(10));
  request.label = options.label;
  request.context.name = options.context.name;
  request.context.number = options.context.number;
  request.context.pass = options.context.pass;
  request.advice = options.advice;
  request.divide_by = options.divide_by;
  if (request.peer < 0 || request.peer >= size()) {
    refuse(request.what, "rank {} is not in this group of {}", request.peer, size());
  }
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
  if (request.divide_by != 0 && (request.divide_by < 0 || !device.is_cpu() || has_python_ranks())) {
    refuse(
        request.what,
        "divide_by = {}: a number above 0, for tensors on the CPU, in a group without Python ranks",
        request.divide_by);
  }
  for (const at::Tensor& output : request.outputs) {
    if (!output.is_contiguous() && at::has_internal_overlap(output) == at::MemOverlap::Yes) {
      refuse(request.what, "an output's elements share memory (an expanded tensor?): use .clone()");
    }
  }
  return start_call(*transport_, std::move(request));
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
  check_memory("empty", options, *transport_);
  return transport_->empty(sizes, options);
}

at::Tensor Group::shared(at::IntArrayRef sizes, at::TensorOptions options) const {
  check_memory("shared", options, *transport_);
  return transport_->shared(sizes, options);
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

Group Group::split(int color, int key) const {
  refuse_python_ranks("split()");
  const Choice mine{color, key};
  const auto all =
      all_gather_bytes({reinterpret_cast<const char*>(&mine), sizeof mine}, {.label = "split"});
  std::vector<std::pair<int, int>> members;  // (key, rank)
  for (int r = 0; r < size(); ++r) {
    Choice choice;
    std::copy(all[r].begin(), all[r].end(), reinterpret_cast<char*>(&choice));
    if (choice.color == color) members.emplace_back(choice.key, r);
  }
  if (color < 0 || members.size() == 1) return Group();
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& [unused, r] : members) ranks.push_back(r);
  return Group(transport_->subset(ranks, color));
}

}  // namespace lockstep::comm
