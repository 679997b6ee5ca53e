#include "comm/gloo_wire.h"

#include <ATen/ATen.h>

#include <limits>

namespace lockstep::comm {
namespace {

c10d::ReduceOp op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Average:
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
  }
  return c10d::ReduceOp::SUM;
}

bool is_any(ReduceOp op) {
  return op == ReduceOp::Sum || op == ReduceOp::Max || op == ReduceOp::BitwiseOr;
}

// Turns floating-point bits into integers of the same order and back: negative numbers have all
// bits but the sign inverted.
template <class Int>
at::Tensor reordered(const at::Tensor& bits) {
  return bits ^
         (at::bitwise_right_shift(bits, at::Scalar(static_cast<int64_t>(8 * sizeof(Int) - 1))) &
          at::Scalar(std::numeric_limits<Int>::max()));
}

template <class Int>
Wire comparable(const at::Tensor& source, ReduceOp op) {
  constexpr auto kInteger = c10::CppTypeToScalarType<Int>::value;
  constexpr auto kReal = sizeof(Int) == 4 ? at::kFloat : at::kDouble;
  const at::Tensor real = source.to(kReal);
  // The ends of the integers' range are NaNs when turned back.
  const Int nan =
      op == ReduceOp::Min ? std::numeric_limits<Int>::min() : std::numeric_limits<Int>::max();
  at::Tensor wire = reordered<Int>(real.view(kInteger)).masked_fill_(real.isnan(), at::Scalar(nan));
  return {wire, op_of(op), [wire](const at::Tensor& target, int) {
            target.copy_(reordered<Int>(wire).view(kReal));
          }};
}

}  // namespace

at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.detach().view({-1}).view(at::kByte); }

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

Wire wire_of(const at::Tensor& source, ReduceOp op, GlooPeers peers) {
  const at::Tensor flat = source.detach().view({-1});
  const at::ScalarType dtype = flat.scalar_type();
  if (dtype == at::kBool) {
    const at::Tensor bytes = flat.view(at::kByte);
    return {bytes, is_any(op) ? c10d::ReduceOp::MAX : c10d::ReduceOp::MIN,
            [bytes](const at::Tensor& target, int) { target.copy_(bytes); }};
  }
  const bool compares = op == ReduceOp::Min || op == ReduceOp::Max;
  if (compares && at::isFloatingType(dtype) && peers == GlooPeers::Lockstep) {
    return dtype == at::kDouble ? comparable<int64_t>(flat, op) : comparable<int32_t>(flat, op);
  }
  const at::Tensor wire = dtype == at::kShort ? flat.to(at::kInt) : flat;
  return {wire, op_of(op), [wire, op](const at::Tensor& target, int size) {
            if (!target.is_alias_of(wire)) target.copy_(wire);
            if (op != ReduceOp::Average) return;
            if (at::isFloatingType(target.scalar_type())) {
              target.div_(size);
            } else {
              target.div_(size, "trunc");
            }
          }};
}

}  // namespace lockstep::comm
