#include "comm/check.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "comm/call.h"
#include "lockstep/core/log.h"

namespace lockstep::comm {
namespace {

bool by_begin(const Span& a, const Span& b) { return a.begin < b.begin; }

bool any_overlap(std::vector<Span> spans) {
  std::sort(spans.begin(), spans.end(), by_begin);
  return std::adjacent_find(spans.begin(), spans.end(), &overlap) != spans.end();
}

// Of how many elements each address is looked at.
constexpr int64_t kMostLooked = 1 << 12;

// Appends the elements of `tensor` from dimension `d` on.
void list_elements(std::vector<Span>& all, const at::Tensor& tensor, const char* at, int64_t d) {
  if (d == tensor.dim()) return all.push_back({at, at + tensor.element_size()});
  for (int64_t i = 0; i < tensor.size(d); ++i)
    list_elements(all, tensor, at + i * tensor.stride(d) * tensor.element_size(), d + 1);
}

// Whether two elements of the tensors share memory; of many elements, whether two tensors begin at
// the same one.
bool share_elements(const std::vector<at::Tensor>& tensors) {
  int64_t count = 0;
  for (const at::Tensor& tensor : tensors) count += tensor.numel();
  std::vector<Span> spans;
  for (const at::Tensor& tensor : tensors) {
    const Span whole = span_of(tensor);
    if (tensor.numel() == 0) continue;
    if (count <= kMostLooked) {
      list_elements(spans, tensor, whole.begin, 0);
    } else {
      spans.push_back({whole.begin, whole.begin + tensor.element_size()});
    }
  }
  return any_overlap(std::move(spans));
}

// Each dimension steps over all that the smaller steps reach: no two elements share memory.
bool is_nested(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < reach) return false;
    reach += stride * (size - 1);
  }
  return true;
}

// More elements than there is room for, a dimension without a stride, or, of few elements, any two
// in one place.
bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.is_contiguous() || tensor.numel() == 0 || is_nested(tensor)) return false;
  const Span span = span_of(tensor);
  return static_cast<std::ptrdiff_t>(tensor.nbytes()) > span.end - span.begin ||
         at::has_internal_overlap(tensor) == at::MemOverlap::Yes || share_elements({tensor});
}

// Whether `part` is this rank's part of `whole`, in the same memory.
bool is_own_part(const at::Tensor& part, const at::Tensor& whole, int rank) {
  return part.is_contiguous() && whole.is_contiguous() &&
         part.const_data_ptr() ==
             static_cast<const char*>(whole.const_data_ptr()) + rank * part.nbytes();
}

bool may_be_in_place(const Request& request, int rank) {
  const std::vector<at::Tensor>&in = request.inputs, &out = request.outputs;
  if (request.what == Collective::AllGather) {
    return out.size() == 1 ? is_own_part(in[0], out[0], rank)
                           : is_own_part(in[0], out[static_cast<size_t>(rank)], 0);
  }
  return request.what == Collective::ReduceScatter && in.size() == 1 &&
         is_own_part(out[0], in[0], rank);
}

}  // namespace

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

void warn_of_history(Collective what, const std::vector<at::Tensor>& tensors) {
  const auto has_history = [](const at::Tensor& tensor) {
    return tensor.requires_grad() && tensor.grad_fn();
  };
  if (!at::GradMode::is_enabled() || std::ranges::none_of(tensors, has_history)) return;
  static std::atomic_flag is_said;
  if (is_said.test_and_set()) return;
  log::warn(fmt::format(
      "[comm] {} of a tensor that has a history, which autograd does not follow to other ranks: "
      "lockstep::functional has collectives with gradients; where none is meant, detach()",
      name_of(what)));
}

void check_tensor(Collective what, const at::Tensor& tensor) {
  if (!tensor.defined()) refuse(what, "a tensor is undefined");
  if (!carried(tensor.scalar_type())) {
    refuse(what,
           "dtype {} is not supported; use float32/64, float16, bfloat16, float8_e4m3fn, "
           "float8_e5m2, int8/16/32/64, uint8/16/32/64, bool or complex64/128",
           name_of(tensor.scalar_type()));
  }
  if (tensor.layout() != at::kStrided) refuse(what, "a tensor is not dense: use .to_dense()");
  if (tensor._is_zerotensor())
    refuse(what, "a tensor of zeros has no memory (_efficientzerotensor): use zeros_like()");
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
  if (op < ReduceOp::Sum || op > ReduceOp::PreMulSum)
    refuse(what, "{} is not a ReduceOp", static_cast<int>(op));
  const bool bitwise =
      op == ReduceOp::BitwiseAnd || op == ReduceOp::BitwiseOr || op == ReduceOp::BitwiseXor;
  const bool orders = op == ReduceOp::Min || op == ReduceOp::Max;
  const bool whole = !at::isFloatingType(dtype) && !at::isComplexType(dtype);
  if ((bitwise && !whole) || (op == ReduceOp::Average && dtype == at::kBool) ||
      (orders && at::isComplexType(dtype)) || (op == ReduceOp::PreMulSum && whole)) {
    refuse(what, "{} has no meaning for {}", name_of(op), name_of(dtype));
  }
}

void check_outputs(Collective what, const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (overlaps_itself(output))
      refuse(what, "an output's elements share memory (an expanded tensor?): use .clone()");
  }
  if (outputs.size() < 2) return;
  bool gaps = false;
  std::vector<Span> spans;
  for (const at::Tensor& output : outputs) {
    gaps = gaps || !output.is_non_overlapping_and_dense();
    if (output.numel() > 0) spans.push_back(span_of(output));
  }
  // One with gaps may lie between the elements of another.
  if (any_overlap(std::move(spans)) && (!gaps || share_elements(outputs)))
    refuse(what, "two outputs share memory: give each its own");
}

void separate(Request& request, int rank) {
  if (request.inputs.empty() || request.outputs.empty()) return;
  if (may_be_in_place(request, rank)) return;
  std::vector<Span> outputs;
  for (const at::Tensor& output : request.outputs) outputs.push_back(span_of(output));
  std::sort(outputs.begin(), outputs.end(), by_begin);
  // Now each span ends where the furthest of those up to it does.
  for (size_t i = 1; i < outputs.size(); ++i)
    outputs[i].end = std::max(outputs[i - 1].end, outputs[i].end);
  for (at::Tensor& input : request.inputs) {
    const Span span = span_of(input);
    const auto behind = std::lower_bound(outputs.begin(), outputs.end(), Span{span.end}, by_begin);
    if (behind != outputs.begin() && (behind - 1)->end > span.begin) input = input.detach().clone();
  }
}

at::Tensor separate(const at::Tensor& input, const at::Tensor& output) {
  return overlap(span_of(input), span_of(output)) ? input.detach().clone() : input;
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

void check_rank(Collective what, int rank, int size) {
  if (rank < 0 || rank >= size) refuse(what, "rank {} is not in this group of {}", rank, size);
}

void check_memory(std::string_view what, at::IntArrayRef sizes, const at::TensorOptions& options,
                  const Transport& transport) {
  const auto refused = [&](std::string_view why) {
    return ConfigError(fmt::format("[comm] {}: {}", what, why));
  };
  auto bytes = static_cast<int64_t>(options.dtype().itemsize());
  for (const int64_t size : sizes) {
    if (size >= 0 && !__builtin_mul_overflow(bytes, size, &bytes)) continue;
    throw refused(fmt::format("sizes [{}] {}", fmt::join(sizes, ", "),
                              size < 0 ? "need to be 0 or more" : "are more than a memory has"));
  }
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  if (options.requires_grad() && !at::isFloatingType(dtype) && !at::isComplexType(dtype))
    throw refused(fmt::format("{} has no gradients: leave out requires_grad", name_of(dtype)));
  transport.unfinished()->check_process(what);
  if (transport.carries(options.device())) return;
  const at::Device own = transport.device();
  throw refused(fmt::format("this group's memory is on {}, not on {}",
                            own.is_cpu() ? "the CPU" : own.str() + " and the CPU",
                            options.device().str()));
}

void check_options(Collective what, ReduceOp op, const CallOptions& options, at::Device device) {
  if (options.divide_by != 0 && op != ReduceOp::Average) {
    refuse(what, "CallOptions::divide_by = {} is for ReduceOp::Average: leave it out",
           options.divide_by);
  }
  if (options.factor != 1 && op != ReduceOp::PreMulSum) {
    refuse(what, "CallOptions::factor = {} is for ReduceOp::PreMulSum: leave it out",
           options.factor);
  }
  if (!options.stream) return;
  if (device.is_cpu())
    refuse(what, "CallOptions::stream is for tensors on a device, these are on the CPU");
  if (options.stream->device() != device) {
    refuse(what, "the tensors are on {}, CallOptions::stream is of {}", device.str(),
           options.stream->device().str());
  }
}

}  // namespace lockstep::comm
