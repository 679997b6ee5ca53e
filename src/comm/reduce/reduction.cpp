#include "comm/reduce/reduction.h"

namespace lockstep::comm {
namespace {

Element element_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return Element::Float32;
    case at::kDouble:
      return Element::Float64;
    case at::kHalf:
      return Element::Float16;
    case at::kBFloat16:
      return Element::BFloat16;
    case at::kChar:
      return Element::Int8;
    case at::kShort:
      return Element::Int16;
    case at::kInt:
      return Element::Int32;
    case at::kLong:
      return Element::Int64;
    case at::kBool:
      return Element::Bool;
    default:
      return Element::UInt8;
  }
}

}  // namespace

Reduction reduction_of(const Request& request, int ranks) {
  const at::ScalarType dtype = request.dtype();
  const bool is_bool = dtype == at::kBool;
  const Element element = element_of(dtype);
  switch (request.op) {
    case ReduceOp::Sum:
      return {element, is_bool ? Combine::Or : Combine::Sum};
    case ReduceOp::Average:
      return {element, Combine::Sum, request.divide_by > 0 ? request.divide_by : ranks};
    case ReduceOp::Min:
      return {element, is_bool ? Combine::And : Combine::Min};
    case ReduceOp::Max:
      return {element, is_bool ? Combine::Or : Combine::Max};
    case ReduceOp::Product:
      return {element, is_bool ? Combine::And : Combine::Product};
    case ReduceOp::BitwiseAnd:
      return {element, Combine::And};
    case ReduceOp::BitwiseOr:
      return {element, Combine::Or};
  }
  return {};
}

}  // namespace lockstep::comm
