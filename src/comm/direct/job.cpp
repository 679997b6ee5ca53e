#include "comm/direct/job.h"

#include <algorithm>
#include <cstring>

#include "comm/reduce/reduction.h"
#include "comm/reduce/slice.h"

namespace lockstep::comm {
namespace {

// Up to this many bytes every rank sends all it has to all others and adds up everything itself:
// one step instead of two, while what it then sends in all stays small.
constexpr int64_t kMostOneShot = 16 << 10;
constexpr int64_t kLeastOneShot = 512;
constexpr int64_t kMostSent = 48 << 10;

int64_t one_shot_bytes(int size) {
  return std::clamp(kMostSent / std::max(1, size - 1), kLeastOneShot, kMostOneShot);
}

DirectJob all_reduce_job(const Request& request, int rank, int size, int ranks) {
  const at::Tensor& tensor = request.outputs[0];
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const std::vector<at::Tensor>& nodes = request.inputs.empty() ? request.outputs : request.inputs;
  DirectCall call{.reduction = reduction_of(request, ranks)};
  if (bytes <= one_shot_bytes(size)) {
    const auto whole = std::make_shared<std::vector<char>>(bytes);
    for (const at::Tensor& node : nodes) call.parts.emplace_back(size, data_of(node));
    call.bytes.assign(size, bytes);
    call.sum = whole->data();
    return {std::move(call), [whole, nodes, tensor] {
              std::memcpy(tensor.data_ptr(), whole->data(), whole->size());
            }};
  }
  call.parts.resize(nodes.size());
  for (int r = 0; r < size; ++r) {
    const Range slice = slice_of(r, size, tensor.numel(), tensor.element_size());
    const int64_t begin = slice.begin * tensor.element_size();
    for (size_t j = 0; j < nodes.size(); ++j) call.parts[j].push_back(data_of(nodes[j]) + begin);
    call.results.push_back(data_of(tensor) + begin);
    call.bytes.push_back(slice.size() * tensor.element_size());
    if (r != rank) call.takers.push_back(r);
  }
  call.sum = call.results[rank];
  return {std::move(call), [nodes, tensor] {}};
}

DirectJob reduce_job(const Request& request, int rank, int size, int ranks) {
  const at::Tensor& tensor = request.outputs[0];
  DirectCall call{.reduction = reduction_of(request, ranks)};
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

DirectJob reduce_scatter_job(const Request& request, int size, int ranks) {
  const at::Tensor& output = request.outputs[0];
  const auto& inputs = request.inputs;
  const bool one = inputs.size() == 1 && size > 1;
  DirectCall call{.reduction = reduction_of(request, ranks)};
  call.parts.resize(one ? 1 : inputs.size() / size);
  for (int r = 0; r < size; ++r) {
    call.bytes.push_back(static_cast<int64_t>(one ? output.nbytes() : inputs[r].nbytes()));
    for (size_t j = 0; j < call.parts.size(); ++j) {
      call.parts[j].push_back(one ? data_of(inputs[0]) + r * call.bytes[r]
                                  : data_of(inputs[j * size + r]));
    }
  }
  call.sum = data_of(output);
  return {std::move(call), [inputs, output] {}};
}

}  // namespace

DirectJob direct_job(const Request& request, int rank, int size, int ranks) {
  switch (request.what) {
    case Collective::AllReduce:
      return all_reduce_job(request, rank, size, ranks);
    case Collective::Reduce:
      return reduce_job(request, rank, size, ranks);
    default:
      return reduce_scatter_job(request, size, ranks);
  }
}

}  // namespace lockstep::comm
