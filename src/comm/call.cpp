#include "comm/call.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>

#include "comm/assign.h"
#include "comm/check.h"
#include "core/flight/record.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::comm {
namespace {

template <size_t N>
void put_text(std::array<char, N>& to, std::string_view text) {
  std::memcpy(to.data(), text.data(), std::min(text.size(), N - 1));  // the rest stays zero
}

flight::Operation operation_of(const Request& request) {
  flight::Operation operation{.start_ns = flight::now_ns()};
  put_text(operation.what, name_of(request.what, request.op));
  put_text(operation.label, request.label);
  if (request.what == Collective::Barrier) return operation;
  put_text(operation.dtype, name_of(request.dtype()));
  operation.count = 0;
  for (const at::Tensor& tensor : request.outputs.empty() ? request.inputs : request.outputs) {
    operation.count += tensor.numel();
  }
  const bool has_peer = request.what == Collective::Reduce ||
                        request.what == Collective::Broadcast ||
                        request.what == Collective::Gather || request.what == Collective::Scatter ||
                        request.what == Collective::Send || request.what == Collective::Recv;
  if (has_peer) operation.peer = request.peer;
  return operation;
}

// Records the call, when it began and that this rank waits in it.
Work start_recorded(Transport& transport, Request&& request) {
  if (transport.size() == 1) return transport.start(std::move(request));
  const flight::Operation operation = operation_of(request);
  const uint32_t call = flight::begin(operation);
  request.call = call;
  if (call == 1) log::info(fmt::format("first call: {}", request.name()));
  const flight::Span blocked(flight::Activity::Communication, call, operation.start_ns);
  try {
    Work work = transport.start(std::move(request));
    work.set_call(call);
    return work;
  } catch (const CommError& error) {
    flight::report_failure(error.what(), flight::Blame::Peer);
    throw;
  }
}

// A contiguous tensor as transports take it. A dimension of one element, or of a tensor without
// any, counts as contiguous with any stride, but then its parts cannot be viewed as bytes.
at::Tensor plain(const at::Tensor& tensor) {
  int64_t stride = 1;
  bool is_odd = false;
  for (int64_t d = tensor.dim() - 1; d >= 0; stride *= std::max<int64_t>(1, tensor.size(d--))) {
    is_odd = is_odd || tensor.stride(d) != stride;
  }
  return is_odd ? tensor.detach().as_strided({tensor.numel()}, {1}) : tensor;
}

// What PreMulSum adds up of this rank. On the CPU libtorch multiplies no floats of one byte, and
// complex numbers by (factor + 0i), which makes a NaN of the part beside an infinite one.
at::Tensor multiplied(const at::Tensor& tensor, double factor) {
  const at::NoGradGuard no_grad;
  const at::ScalarType dtype = tensor.scalar_type();
  if (tensor.is_complex()) {
    const at::Tensor parts = at::view_as_real(tensor.detach().resolve_conj().contiguous());
    return at::view_as_complex(parts * factor);
  }
  if (tensor.element_size() > 1) return tensor.detach() * factor;
  return (tensor.detach().to(at::kFloat) * factor).to(dtype);
}

// Temporary copies of the caller's tensors, with the tensors to copy results back into.
using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;

void multiply(Request& request, int rank, Copies& copies) {
  for (at::Tensor& input : request.inputs) input = multiplied(input, request.factor);
  if (request.what == Collective::ReduceScatter) return;
  at::Tensor& output = request.outputs.front();
  const at::Tensor target = output.detach();
  if (request.what == Collective::AllReduce) {
    assign(target, multiplied(target, request.factor));
  } else {
    // Only the root's tensor changes.
    output = multiplied(target, request.factor).contiguous();
    if (rank == request.peer) copies.emplace_back(target, output);
  }
}

// All memory between the first and the last element of each tensor.
Memory memory_of(const std::vector<at::Tensor>& tensors) {
  Memory memory;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const Span part = span_of(tensor);
    Span& whole = memory.whole;
    whole = {whole.begin == nullptr ? part.begin : std::min(whole.begin, part.begin),
             std::max(whole.end, part.end)};
    if (tensors.size() > 1) memory.parts.push_back(part);
  }
  return memory;
}

// An operation that is over, of a group.
class Over : public Pending {
 public:
  Over() { set_over(); }

 private:
  void finish() override {}
  bool advance() override { return true; }
};

// An operation on copies of tensors that are not contiguous: copies the results back when it is
// over.
class CopyBack : public Pending {
 public:
  CopyBack(Work work, Copies copies) : work_(std::move(work)), copies_(std::move(copies)) {}

 private:
  void finish() override {
    work_.wait();
    copy();
  }
  bool finish_within(std::chrono::microseconds limit) override {
    if (!work_.wait_for(limit)) return false;
    copy();
    return true;
  }
  void copy() {
    for (auto& [target, source] : copies_) assign(target, source);
  }
  bool advance() override { return work_.is_completed(); }

  Work work_;
  Copies copies_;
};

// Makes a stream the current one of its device, where one was given.
class Current {
 public:
  explicit Current(const std::optional<c10::Stream>& stream) {
    if (stream) guard_.emplace(*stream);
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

// One after another, on a stream of the caller's choice.
class Together : public Pending {
 public:
  Together(std::vector<Work> works, std::optional<c10::Stream> stream, std::function<void()> finish)
      : works_(std::move(works)), stream_(stream), finish_(std::move(finish)) {}

 private:
  void finish() override {
    const Current current(stream_);
    for (Work& work : works_) work.wait();
    finish_();
  }
  bool finish_within(std::chrono::microseconds limit) override {
    const Current current(stream_);
    const auto until = std::chrono::steady_clock::now() + limit;
    for (Work& work : works_) {
      const auto left =
          std::chrono::ceil<std::chrono::microseconds>(until - std::chrono::steady_clock::now());
      if (!work.wait_for(std::max(left, std::chrono::microseconds(0)))) return false;
    }
    finish_();
    return true;
  }
  bool advance() override {
    return std::all_of(works_.begin(), works_.end(),
                       [](Work& work) { return work.is_completed(); });
  }

  std::vector<Work> works_;
  const std::optional<c10::Stream> stream_;
  std::function<void()> finish_;
};

}  // namespace

void finish_dropped(Transport& transport, const Uses& uses) {
  transport.unfinished()->finish_before(uses);
  Unfinished::of_this_thread().finish_all();
}

Span span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const char* const begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * tensor.element_size()};
}

Uses uses_of(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs) {
  return {memory_of(inputs), memory_of(outputs)};
}

Work together(Transport& transport, Uses uses, std::vector<Work> works,
              std::optional<c10::Stream> stream, std::function<void()> finish) {
  auto all = std::make_shared<Together>(std::move(works), stream, std::move(finish));
  all->belong_to(transport.unfinished(), std::move(uses));
  return Work(std::move(all));
}

Work copy_alone(Transport& transport, const at::Tensor& output, const at::Tensor& input,
                std::optional<c10::Stream> stream) {
  const Current current(stream);
  finish_dropped(transport, uses_of({input}, {output}));
  assign(output.detach(), separate(input, output).detach().reshape(output.sizes()));
  return {};
}

Work start_call(Transport& transport, Request&& request, std::optional<c10::Stream> stream) {
  const Current current(stream);
  Uses uses = uses_of(request.inputs, request.outputs);
  finish_dropped(transport, uses);
  separate(request, transport.rank());
  Copies copies;
  if (reduces(request.what) && request.op == ReduceOp::PreMulSum)
    multiply(request, transport.rank(), copies);
  for (at::Tensor& input : request.inputs) {
    // A conjugate that libtorch has put off is none in memory.
    input = input.detach().resolve_conj().resolve_neg();
    input = input.is_contiguous() ? plain(input) : input.contiguous();
  }
  for (at::Tensor& output : request.outputs) {
    if (output.is_contiguous() && !output.is_conj() && !output.is_neg()) {
      output = plain(output);
      continue;
    }
    at::Tensor target = output.detach();
    output = target.resolve_conj().resolve_neg().contiguous();
    copies.emplace_back(target, output);
  }
  Work work = start_recorded(transport, std::move(request));
  if (!copies.empty()) work = Work(std::make_shared<CopyBack>(std::move(work), std::move(copies)));
  if (stream && work.pending())
    work = Work(std::make_shared<Together>(std::vector{std::move(work)}, stream, [] {}));
  if (!work.pending()) work = Work(std::make_shared<Over>());
  work.pending()->belong_to(transport.unfinished(), std::move(uses));
  return work;
}

}  // namespace lockstep::comm
