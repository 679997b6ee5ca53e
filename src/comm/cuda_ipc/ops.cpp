#include "comm/cuda_ipc/ops.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "comm/device/memory.h"
#include "comm/reduce/reduction.h"
#include "core/divided_up.h"
#include "core/hash/mix.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using cuda_ipc::kPacket;

// Up to here every rank reads everything and combines it itself: one meeting. Above, each rank
// combines a part, and reads the others' results. Where it should be has not been measured.
constexpr int64_t kAtOnce = 256 << 10;
// Of a round, for each block.
constexpr int64_t kBlockBytes = 16 << 10;

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

uint32_t kind_of(const DeviceCall& call) { return fnv1a<uint32_t>(call.notice.signature); }

}  // namespace

CudaIpcOps::CudaIpcOps(std::shared_ptr<cuda_ipc::Communicator> comm, cuda_ipc::Sharing sharing,
                       int most_blocks)
    : comm_(std::move(comm)),
      sharing_(std::move(sharing)),
      rank_(comm_->peers().rank),
      size_(comm_->peers().size),
      most_blocks_(most_blocks) {}

std::optional<std::string> CudaIpcOps::refuses_graphs() const {
  if (comm_->peers().arrivals == nullptr) return std::nullopt;
  return "ranks that take turns on a GPU let its streams wait, each time for another value: start "
         "MPS (docs/transports.md), give each rank a GPU, or call it outside of "
         "the captured part";
}

// Where streams wait, a device does not choose by what the others have said.
at::Tensor CudaIpcOps::empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const int64_t bytes =
      c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
  if (bytes <= kAtOnce || comm_->peers().arrivals != nullptr) return at::zeros(sizes, options);
  std::vector<cuda_ipc::DeviceMemory> memory;
  try {
    memory = sharing_.memory_of_all(*comm_, static_cast<cuda_ipc::U64>(bytes));
  } catch (const ConfigError&) {
    // On all ranks: one of them has none to share. Libtorch may have some in reserve.
    return at::zeros(sizes, options);
  }
  char* own = comm_->share(std::move(memory), static_cast<cuda_ipc::U64>(bytes));
  return tensor_over(own, sizes, options,
                     [comm = comm_](void* gone) { comm->forget(static_cast<char*>(gone)); });
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
  plan.largest = rounded_up(divided_up(bytes, size_), static_cast<int64_t>(kPacket));
  for (int r = 0; r < size_; ++r) {
    const int64_t begin = std::min(bytes, r * plan.largest);
    plan.in.push_back({data_of(tensor) + begin, std::min(bytes - begin, plan.largest), r, r});
  }
  plan.combined = {plan.in[rank_]};
  if (receives) plan.out = plan.in;
  if (request.what == Collective::AllReduce) {
    const Part& own = plan.in[rank_];
    plan.direct = {.whole = data_of(tensor),
                   .data = own.data,
                   .bytes = own.bytes,
                   .reads = true,
                   .writes = true};
  }
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
      if (request.inputs.size() == 1 && plan.largest % static_cast<int64_t>(kPacket) == 0) {
        plan.direct = {.whole = data_of(request.inputs[0]),
                       .data = plan.in[rank_].data,
                       .bytes = plan.in[rank_].bytes,
                       .own = plan.combined[0].data,
                       .reads = true};
      }
      break;
    case Collective::AllGather:
      plan.in = own(request.inputs[0]);
      plan.out = from_first_slots(parts_of(request.outputs));
      plan.largest = widest(plan.out);
      if (request.outputs.size() == 1) {
        plan.direct = {.whole = data_of(request.outputs[0]),
                       .data = plan.out[rank_].data,
                       .bytes = plan.out[rank_].bytes,
                       .own = plan.in[0].data,
                       .writes = true};
      }
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

cuda_ipc::Round CudaIpcOps::round_of(const Plan& plan, const DeviceCall& call) const {
  const int64_t room = room_of(plan);
  const auto piece_of = [&](const Part& part) {
    return cuda_ipc::Piece{part.data, static_cast<cuda_ipc::U64>(part.bytes),
                           static_cast<cuda_ipc::U64>(part.slot * room), part.from};
  };
  // At least one: ranks also compare calls without elements.
  const int64_t rounds = std::max<int64_t>(divided_up(plan.largest, room), 1);
  cuda_ipc::Round round{.peers = comm_->peers(),
                        .stages = cuda_ipc::stage_at(size_, 0, comm_->stage_bytes()),
                        .stage_bytes = comm_->stage_bytes(),
                        .room = static_cast<cuda_ipc::U64>(room),
                        .rounds = static_cast<uint32_t>(rounds),
                        .stage = rounds_ % 2,
                        .kind = kind_of(call),
                        .captured = call.captured,
                        .meets_again = plan.is_in_two ? 1 : 0,
                        .divide_by = plan.reduction.divide_by};
  for (const Part& part : plan.in) round.in[round.in_count++] = piece_of(part);
  for (const Part& part : plan.out) round.out[round.out_count++] = piece_of(part);
  if (!plan.combined.empty()) {
    round.combines = 1;
    round.combined = piece_of(plan.combined[0]);
    if (plan.is_in_two) round.combined.own = nullptr;
  }
  find_direct(round, plan.direct);
  return round;
}

void CudaIpcOps::find_direct(cuda_ipc::Round& round, const DirectPart& part) const {
  if (part.whole == nullptr) return;
  const auto shared = comm_->find(part.whole);
  const auto offset = static_cast<cuda_ipc::U64>(part.data - part.whole);
  if (!shared || shared->offset % kPacket != 0 || (part.reads && offset % kPacket != 0)) return;
  round.where = cuda_ipc::where_of(shared->number, shared->offset);
  round.direct = {.bytes = static_cast<cuda_ipc::U64>(part.bytes),
                  .own = part.own,
                  .reads = part.reads ? 1 : 0,
                  .writes = part.writes ? 1 : 0};
  for (int r = 0; r < size_; ++r) round.direct.part[r] = shared->at[r] + offset;
}

void CudaIpcOps::run(const DeviceCall& call, const c10::Stream& stream) {
  const Request& request = *call.request;
  if (request.what == Collective::Send || request.what == Collective::Recv) return;
  const Plan plan = plan_of(request, call.largest);
  cuda_ipc::Round round = round_of(plan, call);
  // As many on all ranks: block b meets the others' block b.
  const auto blocks = static_cast<unsigned>(
      std::clamp<int64_t>(plan.largest * plan.slots / kBlockBytes, 1, most_blocks_));
  const cuda_ipc::Function middle =
      round.combines != 0 ? comm_->combine(plan.reduction) : comm_->copy();
  if (round.peers.arrivals == nullptr)
    return comm_->launch(middle, blocks, round, stream.native_handle());
  for (uint32_t rounds = std::exchange(round.rounds, 1); rounds > 0; --rounds) {
    run_steps(round, blocks, middle, stream.native_handle());
    round.begin += round.room;
    round.stage = ++rounds_ % 2;
  }
}

// Where streams wait: a round in kernels of which none does.
void CudaIpcOps::run_steps(cuda_ipc::Round& round, unsigned blocks, cuda_ipc::Function middle,
                           cuda_ipc::Stream stream) {
  using cuda_ipc::kArrives, cuda_ipc::kChecks, cuda_ipc::kCombines, cuda_ipc::kPutsIn,
      cuda_ipc::kTakesOut;
  const auto launch = [&](uint32_t steps, cuda_ipc::Function kernel) {
    round.steps = steps;
    round.sequence = meetings_;
    comm_->launch(kernel, blocks, round, stream);
  };
  const auto meet = [&] {
    round.sequence = ++meetings_;
    for (const uint32_t step : {kArrives, kChecks}) {
      round.steps = step;
      comm_->launch(comm_->copy(), 1, round, stream, cuda_ipc::kFewThreads);
      if (step == kArrives) comm_->await(meetings_, stream);
    }
  };
  if (round.in_count > 0) launch(kPutsIn, comm_->copy());
  meet();
  if (round.meets_again == 0) return launch(kCombines | kTakesOut, middle);
  launch(kCombines, middle);
  meet();
  launch(kTakesOut, comm_->copy());
}

cuda_ipc::Message CudaIpcOps::message_of(const DeviceCall& call) const {
  const Request& request = *call.request;
  const bool sends = request.what == Collective::Send;
  const at::Tensor& tensor = sends ? request.inputs[0] : request.outputs[0];
  return {data_of(tensor), tensor.nbytes(), kind_of(call), request.peer, sends ? 1 : 0};
}

void CudaIpcOps::run_messages(const Calls& calls, const c10::Stream& stream) {
  cuda_ipc::Messages messages{.peers = comm_->peers(), .captured = calls.front()->captured};
  std::vector<cuda_ipc::Message> all;
  for (const auto& call : calls) all.push_back(message_of(*call));
  messages.count = static_cast<int>(all.size());
  if (all.size() <= cuda_ipc::kMessagesInCall) {
    std::copy(all.begin(), all.end(), messages.all);
  } else {
    // With the first, which is over when all are.
    calls.front()->list = comm_->list(all, messages.more, messages.captured != 0);
  }
  const auto blocks = static_cast<unsigned>(size_ * 2 * cuda_ipc::kLanes);
  comm_->launch(comm_->message(), blocks, messages, stream.native_handle());
}

}  // namespace lockstep::comm
