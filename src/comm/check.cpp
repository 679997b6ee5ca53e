#include "comm/check.h"

namespace lockstep::comm {
namespace {

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
    case at::kUInt16:
    case at::kUInt32:
    case at::kUInt64:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return true;
    default:
      return false;
  }
}

}  // namespace

void check_tensor(Collective what, const at::Tensor& tensor) {
  if (!tensor.defined()) refuse(what, "a tensor is undefined");
  if (!carried(tensor.scalar_type())) {
    refuse(what,
           "dtype {} is not supported; use float32/64, float16, bfloat16, float8_e4m3fn, "
           "float8_e5m2, int8/16/32/64, uint8/16/32/64, bool or complex64/128",
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
  const bool bitwise =
      op == ReduceOp::BitwiseAnd || op == ReduceOp::BitwiseOr || op == ReduceOp::BitwiseXor;
  const bool orders = op == ReduceOp::Min || op == ReduceOp::Max;
  const bool whole = !at::isFloatingType(dtype) && !at::isComplexType(dtype);
  if ((bitwise && !whole) || (op == ReduceOp::Average && dtype == at::kBool) ||
      (orders && at::isComplexType(dtype)) || (op == ReduceOp::PreMulSum && whole)) {
    refuse(what, "{} has no meaning for {}", name_of(op), name_of(dtype));
  }
}

// torch.distributed's Gloo, which Python ranks use, has none of these.
void check_for_python(Collective what, at::ScalarType dtype, ReduceOp op) {
  const bool unknown = dtype == at::kUInt16 || dtype == at::kUInt32 || dtype == at::kUInt64 ||
                       dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2;
  if (unknown) refuse(what, "torch.distributed's Gloo has no {}: convert it", name_of(dtype));
  if (!reduces(what)) return;
  if (op == ReduceOp::BitwiseXor)
    refuse(what, "torch.distributed's Gloo has no bit_xor: gather it");
  if (op == ReduceOp::PreMulSum)
    refuse(what, "torch.distributed's Gloo has no premul: multiply, then Sum");
  if (op == ReduceOp::Product && at::isComplexType(dtype))
    refuse(what, "torch.distributed's Gloo has no product of {}: gather it", name_of(dtype));
}

void check_stream(Collective what, const CallOptions& options, at::Device device) {
  if (!options.stream) return;
  if (device.is_cpu())
    refuse(what, "CallOptions::stream is for tensors on a device, these are on the CPU");
  if (options.stream->device() != device) {
    refuse(what, "the tensors are on {}, CallOptions::stream is of {}", device.str(),
           options.stream->device().str());
  }
}

}  // namespace lockstep::comm
