#include "comm/nccl/ops.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <limits>

#include "comm/nccl/memory.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using nccl::Api;
using nccl::Communicator;
using nccl::Result;

bool is_extremum(ReduceOp op) { return op == ReduceOp::Min || op == ReduceOp::Max; }

nccl::DataType type_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return nccl::Float32;
    case at::kDouble:
      return nccl::Float64;
    case at::kHalf:
      return nccl::Float16;
    case at::kBFloat16:
      return nccl::Bfloat16;
    case at::kChar:
      return nccl::Int8;
    case at::kInt:
      return nccl::Int32;
    case at::kLong:
      return nccl::Int64;
    default:
      return nccl::Uint8;
  }
}

// NCCL's own average multiplies each rank's part by 1 / size before it adds: the same bits as one
// division of the sum where that factor is a power of two and nothing underflows, as float16 soon
// does.
bool averages_itself(at::ScalarType dtype, int size) {
  return std::has_single_bit(static_cast<unsigned>(size)) && at::isFloatingType(dtype) &&
         dtype != at::kHalf;
}

nccl::RedOp op_of(ReduceOp op, at::ScalarType dtype, int size) {
  const bool logical = dtype == at::kBool;  // bytes of 0 and 1
  switch (op) {
    case ReduceOp::Min:
      return nccl::Min;
    case ReduceOp::Max:
      return nccl::Max;
    case ReduceOp::Product:
      return logical ? nccl::Min : nccl::Prod;
    case ReduceOp::Average:
      return averages_itself(dtype, size) ? nccl::Avg : nccl::Sum;
    default:
      return logical ? nccl::Max : nccl::Sum;
  }
}

// NCCL has neither 16-bit integers nor, on every device, floats of one byte: what they travel as.
// Sums and products of wider integers have the same low bits.
at::ScalarType wide_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kShort:
    case at::kUInt16:
      return at::kInt;
    case at::kUInt32:
      return at::kLong;
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
      return at::kFloat;
    default:
      return dtype;
  }
}

// The first failure of several calls.
class First {
 public:
  void operator()(Result result) {
    if (worst_ == nccl::Success || worst_ == nccl::InProgress) worst_ = result;
  }
  operator Result() const { return worst_; }

 private:
  Result worst_ = nccl::Success;
};

template <class Change>
std::vector<at::Tensor> changed(const std::vector<at::Tensor>& tensors, const Change& change) {
  std::vector<at::Tensor> results;
  for (const at::Tensor& tensor : tensors) results.push_back(change(tensor));
  return results;
}

void post_message(const Api& api, Communicator* comm, const Request& request, nccl::Stream stream,
                  First& result) {
  if (request.what == Collective::Send) {
    const at::Tensor& tensor = request.inputs[0];
    if (tensor.numel() > 0)
      result(api.Send(data_of(tensor), tensor.nbytes(), nccl::Int8, request.peer, comm, stream));
  } else {
    const at::Tensor& tensor = request.outputs[0];
    if (tensor.numel() > 0)
      result(api.Recv(data_of(tensor), tensor.nbytes(), nccl::Int8, request.peer, comm, stream));
  }
}

}  // namespace

void NcclOps::check(const Request& request) const {
  if (!reduces(request.what)) return;
  const at::ScalarType dtype = request.dtype();
  const bool bitwise = request.op == ReduceOp::BitwiseAnd || request.op == ReduceOp::BitwiseOr ||
                       request.op == ReduceOp::BitwiseXor;
  const bool other = (request.op == ReduceOp::Product && at::isComplexType(dtype)) ||
                     (request.op == ReduceOp::Average && dtype == at::kUInt64);
  if (!bitwise && !other) return;
  throw ConfigError(
      fmt::format("[nccl] {}: NCCL has no {}{}: gather the tensors and combine them, or move them "
                  "to the CPU",
                  name_of(request.what), name_of(request.op),
                  bitwise ? "" : fmt::format(" of {}", name_of(dtype))));
}

std::optional<std::string> NcclOps::refuses_graphs() const {
  return "what a group does beside it (deadlines, comparing calls) would not be replayed: call it "
         "outside of the captured part";
}

at::Tensor NcclOps::empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return registered_memory(comm_, sizes, options);
}

void NcclOps::run(const Request& request, const c10::Stream& stream) {
  switch (request.what) {
    case Collective::AllReduce:
    case Collective::Reduce:
    case Collective::ReduceScatter:
      return reduce(request, stream);
    case Collective::AllGather:
      return all_gather(request, stream);
    case Collective::Broadcast:
      return broadcast(request, stream);
    case Collective::AllToAll:
      return exchange(parts_of(request.outputs), parts_of(request.inputs), stream);
    case Collective::Gather: {
      std::vector<at::Tensor> inputs(size_);
      inputs[request.peer] = request.inputs[0];
      return exchange(rank_ == request.peer ? request.outputs : std::vector<at::Tensor>(size_),
                      inputs, stream);
    }
    case Collective::Scatter: {
      std::vector<at::Tensor> outputs(size_);
      outputs[request.peer] = request.outputs[0];
      return exchange(
          outputs, rank_ == request.peer ? request.inputs : std::vector<at::Tensor>(size_), stream);
    }
    default:
      return run_messages({request}, stream);
  }
}

bool NcclOps::receives(const Request& request) const {
  return request.what != Collective::Reduce || request.peer == rank_;
}

void NcclOps::reduce(const Request& request, const c10::Stream& stream) {
  const at::ScalarType dtype = request.dtype();
  if (wide_of(dtype) != dtype) return reduce_widened(request, stream);
  if (dtype == at::kUInt64) return reduce_as_signed(request, stream);
  if (at::isComplexType(dtype)) {
    const auto parts = [](const at::Tensor& tensor) { return at::view_as_real(tensor.detach()); };
    Request real = request;
    real.inputs = changed(request.inputs, parts);
    real.outputs = changed(request.outputs, parts);
    return reduce(real, stream);
  }
  std::vector<at::Tensor> nans;
  if (is_extremum(request.op) && at::isFloatingType(dtype)) nans = flags_of_nans(request, stream);
  reduce_raw(request, stream);
  if (!receives(request)) return;
  for (size_t i = 0; i < nans.size(); ++i) {
    request.outputs[i].detach().masked_fill_(nans[i].to(at::kBool), NAN);
  }
  if (request.op != ReduceOp::Average || averages_itself(dtype, size_)) return;
  for (const at::Tensor& output : request.outputs) {
    at::Tensor sum = output.detach();
    at::isFloatingType(dtype) ? sum.div_(size_) : sum.div_(size_, "trunc");
  }
}

void NcclOps::reduce_widened(const Request& request, const c10::Stream& stream) {
  const at::ScalarType dtype = request.dtype(), wide_dtype = wide_of(dtype);
  const auto widen = [&](const at::Tensor& tensor) { return tensor.detach().to(wide_dtype); };
  // A sum of integers wraps before it is divided.
  const bool divides = request.op == ReduceOp::Average && !at::isFloatingType(dtype);
  Request wide = request;
  wide.inputs = changed(request.inputs, widen);
  wide.outputs = changed(request.outputs, widen);
  if (divides) wide.op = ReduceOp::Sum;
  reduce(wide, stream);
  if (!receives(request)) return;
  for (size_t i = 0; i < wide.outputs.size(); ++i) {
    at::Tensor output = request.outputs[i].detach();
    output.copy_(wide.outputs[i]);
    if (divides) output.copy_(output.to(wide_dtype).div_(size_, "trunc"));
  }
}

// Of 64 bits, of which libtorch has no arithmetic on devices. Sums and products are the same bits;
// with the first bit the other way round, so is the order.
void NcclOps::reduce_as_signed(const Request& request, const c10::Stream& stream) {
  const auto flipped = [&](const at::Tensor& tensor) {
    const at::Tensor bits = tensor.detach().view(at::kLong);
    return is_extremum(request.op) ? bits.bitwise_xor(std::numeric_limits<int64_t>::min()) : bits;
  };
  Request wide = request;
  wide.inputs = changed(request.inputs, flipped);
  wide.outputs = changed(request.outputs, flipped);
  reduce_raw(wide, stream);
  if (!is_extremum(request.op) || !receives(request)) return;
  for (size_t i = 0; i < wide.outputs.size(); ++i)
    request.outputs[i].detach().view(at::kLong).copy_(flipped(wide.outputs[i]));
}

// NCCL's minimum and maximum ignore a NaN where only some ranks have one. Where, for each output.
std::vector<at::Tensor> NcclOps::flags_of_nans(const Request& request, const c10::Stream& stream) {
  const auto flags = [](const at::Tensor& tensor) {
    return at::isnan(tensor.detach()).to(at::kByte);
  };
  Request nans = request;
  nans.op = ReduceOp::Max;
  nans.inputs = changed(request.inputs, flags);
  nans.outputs = changed(request.outputs, flags);
  reduce_raw(nans, stream);
  return nans.outputs;
}

void NcclOps::reduce_raw(const Request& request, const c10::Stream& stream) {
  const nccl::DataType type = type_of(request.dtype());
  const nccl::RedOp op = op_of(request.op, request.dtype(), size_);
  const nccl::Stream handle = stream.native_handle();
  char* out = data_of(request.outputs[0]);
  const auto count = static_cast<size_t>(request.outputs[0].numel());
  comm_->enqueue([&](const Api& api, Communicator* comm) -> Result {
    if (request.what == Collective::AllReduce)
      return api.AllReduce(out, out, count, type, op, comm, handle);
    if (request.what == Collective::Reduce)
      return api.Reduce(out, out, count, type, op, request.peer, comm, handle);
    if (request.inputs.size() == 1) {
      return api.ReduceScatter(data_of(request.inputs[0]), out, count, type, op, comm, handle);
    }
    First result;
    for (int root = 0; root < size_; ++root) {
      const at::Tensor& input = request.inputs[root];
      char* in = data_of(input);
      if (input.numel() == 0) continue;
      result(api.Reduce(in, root == rank_ ? out : in, input.numel(), type, op, root, comm, handle));
    }
    return result;
  });
}

void NcclOps::all_gather(const Request& request, const c10::Stream& stream) {
  const nccl::Stream handle = stream.native_handle();
  const at::Tensor& input = request.inputs[0];
  comm_->enqueue([&](const Api& api, Communicator* comm) -> Result {
    if (request.outputs.size() == 1) {
      return api.AllGather(data_of(input), data_of(request.outputs[0]), input.nbytes(), nccl::Int8,
                           comm, handle);
    }
    First result;
    for (int root = 0; root < size_; ++root) {
      const at::Tensor& output = request.outputs[root];
      if (output.numel() == 0) continue;
      result(api.Broadcast(data_of(root == rank_ ? input : output), data_of(output),
                           output.nbytes(), nccl::Int8, root, comm, handle));
    }
    return result;
  });
}

void NcclOps::broadcast(const Request& request, const c10::Stream& stream) {
  const at::Tensor& tensor = request.outputs[0];
  char* data = data_of(tensor);
  comm_->enqueue([&](const Api& api, Communicator* comm) {
    return api.Broadcast(data, data, tensor.nbytes(), nccl::Int8, request.peer, comm,
                         stream.native_handle());
  });
}

std::vector<at::Tensor> NcclOps::parts_of(const std::vector<at::Tensor>& tensors) const {
  if (tensors.size() != 1) return tensors;
  if (tensors[0].numel() == 0) return std::vector<at::Tensor>(size_);
  return tensors[0].detach().view({size_, -1}).unbind(0);
}

void NcclOps::exchange(const std::vector<at::Tensor>& outputs,
                       const std::vector<at::Tensor>& inputs, const c10::Stream& stream) {
  const auto moves = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.numel() > 0;
  };
  if (moves(outputs[rank_]) && moves(inputs[rank_])) {
    outputs[rank_].detach().view({-1}).copy_(inputs[rank_].detach().view({-1}),
                                             /*non_blocking=*/true);
  }
  std::vector<Request> messages;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if (moves(inputs[peer]))
      messages.push_back({.what = Collective::Send, .inputs = {inputs[peer]}, .peer = peer});
    if (moves(outputs[peer]))
      messages.push_back({.what = Collective::Recv, .outputs = {outputs[peer]}, .peer = peer});
  }
  run_messages(messages, stream);
}

void NcclOps::run_messages(const Calls& calls, const c10::Stream& stream) {
  std::vector<Request> requests;
  for (const auto& call : calls) requests.push_back(*call->request);
  run_messages(requests, stream);
}

void NcclOps::run_messages(const std::vector<Request>& requests, const c10::Stream& stream) {
  comm_->enqueue([&](const Api& api, Communicator* comm) -> Result {
    First result;
    for (const Request& request : requests)
      post_message(api, comm, request, stream.native_handle(), result);
    return result;
  });
}

}  // namespace lockstep::comm
