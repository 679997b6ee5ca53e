#include "comm/tcp/ops.h"

#include <algorithm>
#include <utility>

#include "comm/direct/job.h"
#include "comm/net/ops.h"

namespace lockstep::comm {
namespace {

net::Span span_of(const at::Tensor& tensor) {
  return {data_of(tensor), static_cast<int64_t>(tensor.nbytes())};
}

// One tensor of `size` equal parts, or a list of as many.
std::vector<net::Span> spans_of(const std::vector<at::Tensor>& tensors, int size) {
  std::vector<net::Span> spans;
  if (tensors.size() != 1 || size == 1) {
    for (const at::Tensor& tensor : tensors) spans.push_back(span_of(tensor));
    return spans;
  }
  const net::Span whole = span_of(tensors[0]);
  const int64_t each = whole.bytes / size;
  for (int r = 0; r < size; ++r) spans.push_back({whole.data + r * each, each});
  return spans;
}

bool is_empty(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.numel() == 0; });
}

// Whether every rank knows that there is nothing to send.
bool moves_nothing(const Request& request, int size) {
  switch (request.what) {
    case Collective::AllReduce:
    case Collective::Reduce:
    case Collective::Broadcast:
      return request.outputs[0].numel() == 0;
    case Collective::ReduceScatter:
      return is_empty(request.inputs);
    case Collective::AllGather:
      return is_empty(request.outputs);
    case Collective::AllToAll:
      return !has_own_sizes(request, size) && request.outputs[0].numel() == 0;
    default:
      return false;
  }
}

TcpCall exchange(const Request& request, std::vector<net::Span> in, std::vector<net::Span> out) {
  return {[in = std::move(in), out = std::move(out)](const NetPort& port) {
            net::exchange(port, in, out);
          },
          [inputs = request.inputs, outputs = request.outputs] {}};
}

}  // namespace

bool has_own_sizes(const Request& request, int size) {
  switch (request.what) {
    case Collective::Gather:
    case Collective::Scatter:
      return true;
    case Collective::AllToAll:
      return request.outputs.size() != 1 || size == 1;
    default:
      return false;
  }
}

TcpCall tcp_call(const Request& request, int rank, int size, int ranks,
                 const std::shared_ptr<const Direct>& direct) {
  if (moves_nothing(request, size)) return {};
  const std::vector<net::Span> nothing(static_cast<size_t>(size), net::kNothing);
  const auto me = static_cast<size_t>(rank), peer = static_cast<size_t>(request.peer);
  switch (request.what) {
    case Collective::AllReduce:
    case Collective::Reduce:
    case Collective::ReduceScatter: {
      const auto job = std::make_shared<DirectJob>(direct_job(request, rank, size, ranks));
      return {
          [direct, job](const NetPort& port) { net::reduce(port, direct, std::move(job->call)); },
          [job] { job->finish(); }};
    }
    case Collective::AllGather:
      return exchange(
          request, spans_of(request.outputs, size),
          std::vector<net::Span>(static_cast<size_t>(size), span_of(request.inputs[0])));
    case Collective::AllToAll:
      return exchange(request, spans_of(request.outputs, size), spans_of(request.inputs, size));
    case Collective::Gather: {
      auto out = nothing;
      out[peer] = span_of(request.inputs[0]);
      return exchange(request, me == peer ? spans_of(request.outputs, 1) : nothing, std::move(out));
    }
    case Collective::Scatter: {
      auto in = nothing;
      in[peer] = span_of(request.outputs[0]);
      return exchange(request, std::move(in), me == peer ? spans_of(request.inputs, 1) : nothing);
    }
    case Collective::Broadcast:
      return {[root = request.peer, data = span_of(request.outputs[0])](const NetPort& port) {
                net::broadcast(port, root, data);
              },
              [outputs = request.outputs] {}};
    case Collective::Send:
      return {[to = request.peer, data = span_of(request.inputs[0])](const NetPort& port) {
                port.send(to, 0, data.data, data.bytes);
              },
              [inputs = request.inputs] {}};
    case Collective::Recv:
      return {[from = request.peer, data = span_of(request.outputs[0])](const NetPort& port) {
                port.recv(from, 0, data.data, data.bytes);
              },
              [outputs = request.outputs] {}};
    case Collective::Barrier:
      break;
  }
  return {[](const NetPort& port) { net::barrier(port); }};
}

}  // namespace lockstep::comm
