#include "comm/cuda_ipc/ops.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "comm/reduce/reduction.h"
#include "core/hash/mix.h"

namespace lockstep::comm {
namespace {

using cuda_ipc::kPacket;

// Up to here every rank reads everything and combines it itself: one meeting. Above, each rank
// combines a part, and reads the others' results. Where it should be has not been measured.
constexpr int64_t kAtOnce = 256 << 10;
// Of a round, for each block.
constexpr int64_t kBlockBytes = 16 << 10;

int64_t rounded_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

uint32_t kind_of(const DeviceCall& call) { return fnv1a<uint32_t>(call.notice.signature); }

}  // namespace

CudaIpcOps::CudaIpcOps(std::shared_ptr<cuda_ipc::Communicator> comm)
    : comm_(std::move(comm)),
      rank_(comm_->peers().rank),
      size_(comm_->peers().size),
      sent_(size_),
      received_(size_) {}

at::Tensor CudaIpcOps::empty(const std::shared_ptr<DeviceState>&, at::IntArrayRef sizes,
                             const at::TensorOptions& options) {
  return at::zeros(sizes, options);
}

// One contiguous tensor as equal parts, or the list as it is: part r is for or from rank r.
std::vector<CudaIpcOps::Part> CudaIpcOps::parts_of(const std::vector<at::Tensor>& tensors) const {
  std::vector<Part> parts;
  const bool is_one = tensors.size() == 1;
  for (int r = 0; r < size_; ++r) {
    const at::Tensor& tensor = tensors[is_one ? 0 : r];
    const int64_t bytes = bytes_of(tensor) / (is_one ? size_ : 1);
    parts.push_back({data_of(tensor) + (is_one ? r * bytes : 0), bytes, r, r});
  }
  return parts;
}

// all_reduce and reduce.
void CudaIpcOps::plan_reduction(Plan& plan, const Request& request) const {
  const bool receives = request.what == Collective::AllReduce || request.peer == rank_;
  const at::Tensor& tensor = request.outputs[0];
  const int64_t bytes = bytes_of(tensor);
  if (bytes <= kAtOnce) {
    plan.in = {{data_of(tensor), bytes}};
    if (receives) plan.combined = plan.in;
    plan.largest = bytes;
    return;
  }
  plan.slots = size_;
  plan.is_in_two = true;
  plan.largest = rounded_up((bytes + size_ - 1) / size_, static_cast<int64_t>(kPacket));
  for (int r = 0; r < size_; ++r) {
    const int64_t begin = std::min(bytes, r * plan.largest);
    plan.in.push_back({data_of(tensor) + begin, std::min(bytes - begin, plan.largest), r, r});
  }
  plan.combined = {plan.in[rank_]};
  if (receives) plan.out = plan.in;
}

CudaIpcOps::Plan CudaIpcOps::plan_of(const Request& request, int64_t largest) const {
  Plan plan{.largest = largest};
  if (reduces(request.what)) plan.reduction = reduction_of(request, size_);
  const auto widest = [](const std::vector<Part>& parts) {
    int64_t most = 0;
    for (const Part& part : parts) most = std::max(most, part.bytes);
    return most;
  };
  const auto own = [](const at::Tensor& tensor) {
    return std::vector<Part>{{data_of(tensor), bytes_of(tensor)}};
  };
  // Each rank has put what comes from it into the one slot that there is.
  const auto from_first_slots = [](std::vector<Part> parts) {
    for (Part& part : parts) part.slot = 0;
    return parts;
  };
  switch (request.what) {
    case Collective::AllReduce:
    case Collective::Reduce:
      plan_reduction(plan, request);
      break;
    case Collective::ReduceScatter:
      plan.slots = size_;
      plan.in = parts_of(request.inputs);
      plan.combined = {{data_of(request.outputs[0]), bytes_of(request.outputs[0]), rank_}};
      plan.largest = widest(plan.in);
      break;
    case Collective::AllGather:
      plan.in = own(request.inputs[0]);
      plan.out = from_first_slots(parts_of(request.outputs));
      plan.largest = widest(plan.out);
      break;
    case Collective::Broadcast:
      if (rank_ == request.peer) plan.in = own(request.outputs[0]);
      if (rank_ != request.peer) plan.out = own(request.outputs[0]);
      for (Part& part : plan.out) part.from = request.peer;
      plan.largest = bytes_of(request.outputs[0]);
      break;
    case Collective::Gather:
      plan.in = own(request.inputs[0]);
      if (rank_ == request.peer) plan.out = from_first_slots(parts_of(request.outputs));
      break;
    case Collective::Scatter:
      plan.slots = size_;
      if (rank_ == request.peer) plan.in = parts_of(request.inputs);
      plan.out = {{data_of(request.outputs[0]), bytes_of(request.outputs[0]), rank_, request.peer}};
      break;
    case Collective::AllToAll:
      plan.slots = size_;
      plan.in = parts_of(request.inputs);
      plan.out = parts_of(request.outputs);
      for (Part& part : plan.out) part.slot = rank_;
      if (request.outputs.size() == 1) plan.largest = widest(plan.out);
      break;
    default:
      break;
  }
  return plan;
}

int64_t CudaIpcOps::room_of(const Plan& plan) const {
  return static_cast<int64_t>(comm_->stage_bytes() / plan.slots / kPacket * kPacket);
}

void CudaIpcOps::run(const DeviceCall& call, const c10::Stream& stream) {
  const Request& request = *call.request;
  const bool is_message = request.what == Collective::Send || request.what == Collective::Recv;
  const Plan plan = plan_of(request, call.largest);
  const uint32_t kind = kind_of(call);
  const int64_t room = room_of(plan);
  // At least one: ranks also compare calls without elements.
  int64_t begin = 0;
  do {
    if (!is_message) run_round(plan, begin, kind, stream);
    begin += room;
  } while (begin < plan.largest);
}

void CudaIpcOps::run_round(const Plan& plan, int64_t begin, uint32_t kind,
                           const c10::Stream& stream) {
  const int64_t room = room_of(plan);
  const auto piece_of = [&](const Part& part) {
    const int64_t skipped = std::min(begin, part.bytes);
    return cuda_ipc::Piece{part.data + skipped, static_cast<cuda_ipc::U64>(part.slot * room),
                           static_cast<cuda_ipc::U64>(std::min(part.bytes - skipped, room)),
                           part.from};
  };
  cuda_ipc::Round round{.peers = comm_->peers(),
                        .stage = cuda_ipc::stage_at(size_, rounds_++ % 2, comm_->stage_bytes()),
                        .sequence = meetings_,
                        .kind = kind,
                        .meets_again = plan.is_in_two ? 1 : 0,
                        .divide_by = plan.reduction.divide_by};
  meetings_ += plan.is_in_two ? 2 : 1;
  for (const Part& part : plan.in) round.in[round.in_count++] = piece_of(part);
  for (const Part& part : plan.out) round.out[round.out_count++] = piece_of(part);
  if (!plan.combined.empty()) {
    round.combines = 1;
    round.combined = piece_of(plan.combined[0]);
    if (plan.is_in_two)
      round.combined.own = round.peers.memory[rank_] + round.stage + round.combined.at;
  }
  // As many on all ranks: block b meets the others' block b.
  const int64_t bytes = std::min(plan.largest - std::min(begin, plan.largest), room) * plan.slots;
  const auto blocks =
      static_cast<unsigned>(std::clamp<int64_t>(bytes / kBlockBytes, 1, cuda_ipc::kMaxBlocks));
  const cuda_ipc::Function middle =
      round.combines != 0 ? comm_->combine(plan.reduction) : comm_->copy();
  const auto launch = [&](uint32_t steps, cuda_ipc::Function kernel) {
    round.steps = steps;
    comm_->launch(kernel, blocks, round, stream.native_handle());
  };
  using cuda_ipc::kCombines, cuda_ipc::kPutsIn, cuda_ipc::kTakesOut;
  if (round.peers.arrivals == nullptr) return launch(kPutsIn | kCombines | kTakesOut, middle);
  const auto meet = [&](uint32_t sequence) {
    cuda_ipc::Round arrival = round;
    arrival.steps = cuda_ipc::kArrives;
    arrival.sequence = sequence;
    comm_->launch(comm_->copy(), 1, arrival, stream.native_handle());
    comm_->await(sequence, stream.native_handle());
  };
  if (round.in_count > 0) launch(kPutsIn, comm_->copy());
  meet(round.sequence);
  if (!plan.is_in_two) return launch(kCombines | kTakesOut, middle);
  launch(kCombines, middle);
  meet(round.sequence + 1);
  launch(kTakesOut, comm_->copy());
}

cuda_ipc::Message CudaIpcOps::message_of(const DeviceCall& call) {
  const Request& request = *call.request;
  const bool sends = request.what == Collective::Send;
  const at::Tensor& tensor = sends ? request.inputs[0] : request.outputs[0];
  uint32_t& chunks = (sends ? sent_ : received_)[request.peer];
  const cuda_ipc::Message message{data_of(tensor), tensor.nbytes(), kind_of(call),
                                  chunks,          request.peer,    sends ? 1 : 0};
  chunks += static_cast<uint32_t>(cuda_ipc::chunks_of(tensor.nbytes()));
  return message;
}

void CudaIpcOps::run_messages(const Calls& calls, const c10::Stream& stream) {
  cuda_ipc::Messages messages{.peers = comm_->peers()};
  for (const auto& call : calls) messages.all[messages.count++] = message_of(*call);
  const auto blocks = static_cast<unsigned>(size_ * 2 * cuda_ipc::kLanes);
  comm_->launch(comm_->message(), blocks, messages, stream.native_handle());
}

}  // namespace lockstep::comm
