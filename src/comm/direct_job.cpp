#include "comm/direct_job.h"

#include <cstring>

#include "comm/exchange.h"
#include "comm/reduction.h"

namespace lockstep::comm {
namespace {

// Up to here every rank sends all it has to all others and adds up everything itself: one step
// instead of two.
constexpr int64_t kOneShot = 16 << 10;

DirectJob all_reduce_job(const Request& request, int rank, int size) {
  const at::Tensor& tensor = request.outputs[0];
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  char* data = data_of(tensor);
  DirectCall call{.reduction = reduction_of(request.op, tensor.scalar_type(), size)};
  if (bytes <= kOneShot) {
    const auto whole = std::make_shared<std::vector<char>>(bytes);
    call.parts.emplace_back(size, data);
    call.bytes.assign(size, bytes);
    call.sum = whole->data();
    return {std::move(call),
            [whole, tensor] { std::memcpy(tensor.data_ptr(), whole->data(), whole->size()); }};
  }
  call.parts.emplace_back();
  for (int r = 0; r < size; ++r) {
    const Range slice = slice_of(r, size, tensor.numel(), tensor.element_size());
    char* begin = data + slice.begin * tensor.element_size();
    call.parts[0].push_back(begin);
    call.results.push_back(begin);
    call.bytes.push_back(slice.size() * tensor.element_size());
    if (r != rank) call.takers.push_back(r);
  }
  call.sum = call.results[rank];
  return {std::move(call), [tensor] {}};
}

DirectJob reduce_job(const Request& request, int rank, int size) {
  const at::Tensor& tensor = request.outputs[0];
  DirectCall call{.reduction = reduction_of(request.op, tensor.scalar_type(), size)};
  call.parts.emplace_back();
  for (int r = 0; r < size; ++r) {
    const Range slice = slice_of(r, size, tensor.numel(), tensor.element_size());
    call.parts[0].push_back(data_of(tensor) + slice.begin * tensor.element_size());
    call.bytes.push_back(slice.size() * tensor.element_size());
  }
  if (rank == request.peer) {
    for (const char* slice : call.parts[0]) call.results.push_back(const_cast<char*>(slice));
    call.sum = call.results[rank];
    return {std::move(call), [tensor] {}};
  }
  const auto sum = std::make_shared<std::vector<char>>(call.bytes[rank]);
  call.sum = sum->data();
  call.takers = {request.peer};
  return {std::move(call), [tensor, sum] {}};
}

DirectJob reduce_scatter_job(const Request& request, int size) {
  const at::Tensor& output = request.outputs[0];
  const bool one = request.inputs.size() == 1 && size > 1;
  DirectCall call{.reduction = reduction_of(request.op, output.scalar_type(), size)};
  call.parts.emplace_back();
  for (int r = 0; r < size; ++r) {
    const at::Tensor& input = one ? request.inputs[0] : request.inputs[r];
    const auto bytes = static_cast<int64_t>(one ? output.nbytes() : input.nbytes());
    call.parts[0].push_back(data_of(input) + (one ? r * bytes : 0));
    call.bytes.push_back(bytes);
  }
  call.sum = data_of(output);
  return {std::move(call), [inputs = request.inputs, output] {}};
}

}  // namespace

DirectJob direct_job(const Request& request, int rank, int size) {
  switch (request.what) {
    case Collective::AllReduce:
      return all_reduce_job(request, rank, size);
    case Collective::Reduce:
      return reduce_job(request, rank, size);
    default:
      return reduce_scatter_job(request, size);
  }
}

}  // namespace lockstep::comm
