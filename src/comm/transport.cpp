#include "comm/transport.h"

#include <fmt/format.h>

#include <array>
#include <numeric>

namespace lockstep::comm {

std::string_view name_of(Collective what) {
  switch (what) {
    case Collective::AllReduce:
      return "all_reduce";
    case Collective::Reduce:
      return "reduce";
    case Collective::ReduceScatter:
      return "reduce_scatter";
    case Collective::AllGather:
      return "all_gather";
    case Collective::Broadcast:
      return "broadcast";
    case Collective::Gather:
      return "gather";
    case Collective::Scatter:
      return "scatter";
    case Collective::AllToAll:
      return "all_to_all";
    case Collective::Send:
      return "send";
    case Collective::Recv:
      return "recv";
    case Collective::Barrier:
      return "barrier";
  }
  return "?";
}

std::string_view name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return "sum";
    case ReduceOp::Average:
      return "average";
    case ReduceOp::Min:
      return "min";
    case ReduceOp::Max:
      return "max";
    case ReduceOp::Product:
      return "product";
    case ReduceOp::BitwiseAnd:
      return "bit_and";
    case ReduceOp::BitwiseOr:
      return "bit_or";
    case ReduceOp::BitwiseXor:
      return "bit_xor";
    case ReduceOp::PreMulSum:
      return "premul";
  }
  return "?";
}

std::string_view name_of(Collective what, ReduceOp op) {
  if (!reduces(what)) return name_of(what);
  constexpr size_t kOps = static_cast<size_t>(ReduceOp::PreMulSum) + 1;
  using Names = std::array<std::array<std::string, kOps>, 3>;
  // Never freed: threads may communicate while static objects are destroyed.
  static const Names& names = *[] {
    auto* all = new Names;
    for (size_t i = 0; i < all->size(); ++i) {
      for (size_t j = 0; j < kOps; ++j) {
        (*all)[i][j] = fmt::format("{} {}", name_of(static_cast<Collective>(i)),
                                   name_of(static_cast<ReduceOp>(j)));
      }
    }
    return all;
  }();
  return names[static_cast<size_t>(what)][static_cast<size_t>(op)];
}

std::string_view name_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kChar:
      return "int8";
    case at::kShort:
      return "int16";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kByte:
      return "uint8";
    case at::kBool:
      return "bool";
    case at::kUInt16:
      return "uint16";
    case at::kUInt32:
      return "uint32";
    case at::kUInt64:
      return "uint64";
    case at::kComplexHalf:
      return "complex32";
    case at::kComplexFloat:
      return "complex64";
    case at::kComplexDouble:
      return "complex128";
    case at::kFloat8_e4m3fn:
      return "float8_e4m3fn";
    case at::kFloat8_e5m2:
      return "float8_e5m2";
    default:
      return c10::toString(dtype);
  }
}

bool reduces(Collective what) {
  return what == Collective::AllReduce || what == Collective::Reduce ||
         what == Collective::ReduceScatter;
}

char* data_of(const at::Tensor& tensor) {
  static char nothing[64];
  return tensor.numel() == 0 ? nothing : static_cast<char*>(tensor.data_ptr());
}

std::string Request::Context::text() const {
  if (number == 0) return {};
  return fmt::format("{} {}{}", name, number, pass == 0 ? "" : fmt::format(", pass {}", pass));
}

at::ScalarType Request::dtype() const {
  if (!outputs.empty()) return outputs.front().scalar_type();
  if (!inputs.empty()) return inputs.front().scalar_type();
  return at::kByte;
}

std::vector<int> Transport::world_ranks() const {
  if (!world_ranks_.empty()) return world_ranks_;
  std::vector<int> all(static_cast<size_t>(size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace lockstep::comm
