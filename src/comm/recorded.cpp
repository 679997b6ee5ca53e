#include "comm/recorded.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "lockstep/core/error.h"
#include "lockstep/core/flight.h"

namespace lockstep::comm {
namespace {

template <size_t N>
void put_text(std::array<char, N>& to, std::string_view text) {
  std::memcpy(to.data(), text.data(), std::min(text.size(), N - 1));  // the rest stays zero
}

flight::Operation operation_of(const Request& request) {
  flight::Operation operation;
  put_text(operation.what, name_of(request.what));
  if (reduces(request.what)) {
    const size_t length = std::strlen(operation.what.data());
    operation.what[length] = ' ';
    const std::string_view op = name_of(request.op);
    std::memcpy(operation.what.data() + length + 1, op.data(),
                std::min(op.size(), operation.what.size() - length - 2));
  }
  put_text(operation.tag, request.tag);
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

}  // namespace

Work start_recorded(Transport& transport, Request request) {
  if (transport.size() == 1) return transport.start(std::move(request));
  const uint32_t call = flight::begin(operation_of(request));
  const flight::Span blocked(flight::Activity::Communication, call);
  try {
    Work work = transport.start(std::move(request));
    work.set_call(call);
    return work;
  } catch (const CommError& error) {
    flight::report_failure(error.what(), flight::Blame::Peer);
    throw;
  }
}

}  // namespace lockstep::comm
