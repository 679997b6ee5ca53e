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
    case at::kUInt16:
      return Element::UInt16;
    case at::kUInt32:
      return Element::UInt32;
    case at::kUInt64:
      return Element::UInt64;
    case at::kFloat8_e4m3fn:
      return Element::Float8E4M3;
    case at::kFloat8_e5m2:
      return Element::Float8E5M2;
    case at::kComplexFloat:
      return Element::Complex64;
    case at::kComplexDouble:
      return Element::Complex128;
    default:
      return Element::UInt8;
  }
}

// Of whose parts a sum of complex numbers is one.
Element part_of(Element element) {
  if (element == Element::Complex64) return Element::Float32;
  return element == Element::Complex128 ? Element::Float64 : element;
}

}  // namespace

Reduction reduction_of(const Request& request, int ranks) {
  const at::ScalarType dtype = request.dtype();
  const bool is_bool = dtype == at::kBool;
  const Element element = element_of(dtype);
  switch (request.op) {
    case ReduceOp::Sum:
    case ReduceOp::PreMulSum:  // Group has multiplied
      return {part_of(element), is_bool ? Combine::Or : Combine::Sum};
    case ReduceOp::Average:
      return {part_of(element), Combine::Sum, request.divide_by > 0 ? request.divide_by : ranks};
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
    case ReduceOp::BitwiseXor:
      return {element, Combine::Xor};
  }
  return {};
}

}  // namespace lockstep::comm
