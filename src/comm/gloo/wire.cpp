#include "comm/gloo/wire.h"

#include <ATen/ATen.h>

#include "comm/assign.h"

namespace lockstep::comm {
namespace {

c10d::ReduceOp op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Average:
    case ReduceOp::PreMulSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::Min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::Max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::Product:
      return c10d::ReduceOp::PRODUCT;
    case ReduceOp::BitwiseAnd:
      return c10d::ReduceOp::BAND;
    case ReduceOp::BitwiseOr:
      return c10d::ReduceOp::BOR;
    case ReduceOp::BitwiseXor:
      return c10d::ReduceOp::BXOR;
  }
  return c10d::ReduceOp::SUM;
}

bool is_any(ReduceOp op) {
  return op == ReduceOp::Sum || op == ReduceOp::Max || op == ReduceOp::BitwiseOr;
}

}  // namespace

at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.detach().as_strided({tensor.numel()}, {1}).view(at::kByte);
}

std::vector<int64_t> byte_counts(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> counts;
  for (const at::Tensor& tensor : tensors) counts.push_back(static_cast<int64_t>(tensor.nbytes()));
  return counts;
}

std::vector<at::Tensor> bytes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> bytes;
  for (const at::Tensor& tensor : tensors) bytes.push_back(bytes_of(tensor));
  return bytes;
}

Wire wire_of(const at::Tensor& source, ReduceOp op) {
  const at::Tensor flat = source.detach().view({-1});
  const at::ScalarType dtype = flat.scalar_type();
  if (dtype == at::kBool) {
    const at::Tensor bytes = flat.view(at::kByte);
    return {bytes, is_any(op) ? c10d::ReduceOp::MAX : c10d::ReduceOp::MIN,
            [bytes](const at::Tensor& target, int) { assign(target, bytes); }};
  }
  const at::Tensor wire = dtype == at::kShort        ? flat.to(at::kInt)
                          : at::isComplexType(dtype) ? at::view_as_real(flat)
                                                     : flat;
  return {wire, op_of(op), [wire, op](const at::Tensor& target, int size) {
            const Writing writing(target);
            if (!target.is_alias_of(wire)) target.copy_(wire);
            if (op != ReduceOp::Average) return;
            if (at::isIntegralType(target.scalar_type(), /*includeBool=*/true)) {
              target.div_(size, "trunc");
            } else {
              target.div_(size);
            }
          }};
}

}  // namespace lockstep::comm
