#include "comm/gloo/ops.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <numeric>

#include "comm/assign.h"
#include "comm/direct/job.h"
#include "comm/gloo/link.h"
#include "comm/gloo/wire.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// What a tag says: what kind of message it is, which one of its kind, and of which call.
enum class TagKind : uint32_t { Message, Slice, Sum };
constexpr uint32_t kCountBits = 9;
constexpr uint32_t kChecksumBits = 20;

uint32_t tag_of(TagKind kind, uint32_t count, uint32_t checksum) {
  return static_cast<uint32_t>(kind) << (kCountBits + kChecksumBits) |
         (count & ((1u << kCountBits) - 1)) << kChecksumBits |
         (checksum & ((1u << kChecksumBits) - 1));
}

// Of c10d's own collectives, whose tags have 32 bits.
uint32_t collective_tag_of(uint32_t count, uint32_t checksum) {
  return count << kChecksumBits | (checksum & ((1u << kChecksumBits) - 1));
}

// Single-tensor collectives were renamed between libtorch 2.11 and 2.15.
template <class Group>
WireWork gather_into(Group& group, at::Tensor& output, at::Tensor& input,
                     const c10d::AllgatherOptions& options) {
  if constexpr (requires { group.all_gather_single(output, input, options); }) {
    return group.all_gather_single(output, input, options);
  } else {
    return group._allgather_base(output, input, options);
  }
}

template <class Group>
WireWork exchange_into(Group& group, at::Tensor& output, at::Tensor& input,
                       std::vector<int64_t>& in, std::vector<int64_t>& out,
                       const c10d::AllToAllOptions& options) {
  if constexpr (requires { group.all_to_all_single(output, input, in, out, options); }) {
    return group.all_to_all_single(output, input, in, out, options);
  } else {
    return group.alltoall_base(output, input, in, out, options);
  }
}

bool all_equal(const std::vector<at::Tensor>& list) {
  for (const at::Tensor& tensor : list) {
    if (tensor.numel() != list.front().numel()) return false;
  }
  return true;
}

void split_into(const std::vector<at::Tensor>& targets, const at::Tensor& flat) {
  int64_t offset = 0;
  for (const at::Tensor& target : targets) {
    target.copy_(flat.narrow(0, offset, target.numel()));
    offset += target.numel();
  }
}

// Gloo wants an address even where it moves nothing.
at::Tensor room_for(int64_t bytes) { return at::empty({bytes}, at::kByte); }

at::Tensor joined(const std::vector<at::Tensor>& bytes) {
  return bytes.empty() ? room_for(0) : at::cat(bytes);
}

int64_t total_bytes(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// Whether every rank knows that there is nothing to send. Gloo itself, and so torch.distributed's
// ranks, wait for each other in a broadcast and an all_to_all of nothing.
bool moves_nothing(const Request& request, GlooPeers peers) {
  switch (request.what) {
    case Collective::AllReduce:
    case Collective::Reduce:
      return request.outputs[0].numel() == 0;
    case Collective::Broadcast:
      return peers == GlooPeers::Lockstep && request.outputs[0].numel() == 0;
    case Collective::ReduceScatter:
      return total_bytes(byte_counts(request.inputs)) == 0;
    case Collective::AllGather:
      return total_bytes(byte_counts(request.outputs)) == 0;
    case Collective::AllToAll:
      return peers == GlooPeers::Lockstep && request.outputs.size() == 1 &&
             request.outputs[0].numel() == 0;
    default:
      return false;
  }
}

}  // namespace

GlooOps::GlooOps(c10::intrusive_ptr<GlooGroup> group, const GlooOptions& options)
    : group_(std::move(group)),
      peers_(options.peers),
      ranks_(options.nodes.empty() ? group_->getSize() : options.ranks),
      direct_(options.nodes.empty() ? Direct::of_ranks(ranks_) : Direct(options.nodes, ranks_)) {}

GlooCall GlooOps::launch(const Request& request, uint32_t checksum,
                         std::chrono::milliseconds patience, const Await& await) {
  checksum_ = checksum;
  patience_ = patience;
  if (moves_nothing(request, peers_)) {
    if (peers_ == GlooPeers::Python) {
      group_->skip_tag();
    } else {
      ++collectives_;  // a rank that makes one more call meets none of the others
    }
    return {};
  }
  if (peers_ == GlooPeers::Lockstep && reduces(request.what)) return run_direct(request);
  switch (request.what) {
    case Collective::AllReduce:
      return all_reduce(request);
    case Collective::Reduce:
      return reduce(request);
    case Collective::ReduceScatter:
      return reduce_scatter(request);
    case Collective::AllGather:
      return all_gather(request);
    case Collective::Broadcast:
      return broadcast(request);
    case Collective::Gather:
      return gather(request, await);
    case Collective::Scatter:
      return scatter(request, await);
    case Collective::AllToAll:
      return all_to_all(request, await);
    case Collective::Send:
    case Collective::Recv:
      return message(request);
    case Collective::Barrier:
      return barrier();
  }
  throw CommError("[gloo] unknown collective");
}

void GlooOps::next_tag() {
  if (peers_ == GlooPeers::Lockstep) group_->set_tag(collective_tag_of(collectives_++, checksum_));
}

WireWork GlooOps::reduce_all(at::Tensor wire, c10d::ReduceOp op) {
  std::vector<at::Tensor> tensors{std::move(wire)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.timeout = patience_;
  next_tag();
  const std::lock_guard lock(group_->mutex());
  return group_->allreduce(tensors, options);
}

GlooCall GlooOps::run_direct(const Request& request) {
  DirectJob job = direct_job(request, group_->getRank(), group_->getSize(), ranks_);
  const uint32_t count = collectives_++;
  job.call.slice_tag = tag_of(TagKind::Slice, count, checksum_);
  job.call.sum_tag = tag_of(TagKind::Sum, count, checksum_);
  return {
      {worker_.run([direct = direct_, group = group_, patience = patience_, job = std::move(job)] {
        GlooLink link(group, patience);
        direct.run(link, job.call);
        job.finish();
      })}};
}

GlooCall GlooOps::all_reduce(const Request& request) {
  Wire wire = wire_of(request.outputs[0], request.op);
  return {{reduce_all(wire.tensor, wire.op)},
          [unpack = std::move(wire.unpack), target = request.outputs[0].detach().view({-1}),
           size = group_->getSize()] { unpack(target, size); }};
}

GlooCall GlooOps::reduce(const Request& request) {
  const bool is_root = group_->getRank() == request.peer;
  const at::Tensor target = request.outputs[0].detach().view({-1});
  // Gloo leaves partial sums in the tensors of the other ranks.
  Wire wire = wire_of(is_root ? target : target.clone(), request.op);
  std::vector<at::Tensor> tensors{wire.tensor};
  c10d::ReduceOptions options;
  options.reduceOp = wire.op;
  options.rootRank = request.peer;
  options.timeout = patience_;
  next_tag();
  const std::lock_guard lock(group_->mutex());
  GlooCall call{{group_->reduce(tensors, options)}};
  if (is_root) {
    call.finish = [unpack = std::move(wire.unpack), target, size = group_->getSize()] {
      unpack(target, size);
    };
  }
  return call;
}

// c10d's own reduces all parts everywhere, too.
GlooCall GlooOps::reduce_scatter(const Request& request) {
  const int rank = group_->getRank();
  const at::Tensor target = request.outputs[0].detach().view({-1});
  const bool one = request.inputs.size() == 1 && group_->getSize() > 1;
  std::vector<at::Tensor> parts;
  for (const at::Tensor& input : request.inputs) parts.push_back(input.detach().view({-1}));
  const at::Tensor all = one ? parts[0].clone() : at::cat(parts);
  int64_t offset = rank * target.numel();
  if (!one) {
    offset = 0;
    for (int r = 0; r < rank; ++r) offset += parts[r].numel();
  }
  Wire wire = wire_of(all, request.op);
  return {{reduce_all(wire.tensor, wire.op)},
          [unpack = std::move(wire.unpack), all, target, offset, size = group_->getSize()] {
            unpack(all, size);
            assign(target, all.narrow(0, offset, target.numel()));
          }};
}

GlooCall GlooOps::all_gather(const Request& request) {
  const bool one = request.outputs.size() == 1 && group_->getSize() > 1;
  if (!one && !all_equal(request.outputs)) return all_gather_unequal(request);
  at::Tensor input = bytes_of(request.inputs[0]);
  at::Tensor output =
      one ? bytes_of(request.outputs[0]) : room_for(group_->getSize() * input.numel());
  c10d::AllgatherOptions options;
  options.timeout = patience_;
  next_tag();
  const std::lock_guard lock(group_->mutex());
  GlooCall call{{gather_into(*group_, output, input, options)}};
  if (!one) {
    call.finish = [targets = bytes_of(request.outputs), output] { split_into(targets, output); };
  }
  return call;
}

// One broadcast a rank, each of the exact length and straight into its place.
GlooCall GlooOps::all_gather_unequal(const Request& request) {
  const std::vector<at::Tensor> targets = bytes_of(request.outputs);
  targets[group_->getRank()].copy_(bytes_of(request.inputs[0]));
  GlooCall call;
  for (int root = 0; root < group_->getSize(); ++root) {
    if (targets[root].numel() > 0) call.works.push_back(broadcast_bytes(targets[root], root));
  }
  return call;
}

WireWork GlooOps::broadcast_bytes(at::Tensor bytes, int root) {
  std::vector<at::Tensor> tensors{std::move(bytes)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.timeout = patience_;
  next_tag();
  const std::lock_guard lock(group_->mutex());
  return group_->broadcast(tensors, options);
}

GlooCall GlooOps::broadcast(const Request& request) {
  return {{broadcast_bytes(bytes_of(request.outputs[0]), request.peer)}};
}

WireWork GlooOps::exchange(at::Tensor output, std::vector<int64_t> in, at::Tensor input,
                           std::vector<int64_t> out) {
  c10d::AllToAllOptions options;
  options.timeout = patience_;
  next_tag();
  const std::lock_guard lock(group_->mutex());
  return exchange_into(*group_, output, input, in, out, options);
}

// Ranks tell each other what they will send: a message longer than expected would abort the
// process from Gloo's thread.
void GlooOps::compare_counts(const std::vector<int64_t>& in, const std::vector<int64_t>& out,
                             const Await& await) {
  if (peers_ == GlooPeers::Python) return;
  const at::Tensor mine = at::tensor(out, at::kLong);
  const at::Tensor theirs = at::empty_like(mine);
  const std::vector<int64_t> each(out.size(), sizeof(int64_t));
  await(exchange(bytes_of(theirs), each, bytes_of(mine), each));
  for (size_t r = 0; r < in.size(); ++r) {
    const int64_t sends = theirs.const_data_ptr<int64_t>()[r];
    if (sends == in[r]) continue;
    throw CommError(
        fmt::format("does not fit: rank {} sends {} bytes where {} are expected", r, sends, in[r]));
  }
}

GlooCall GlooOps::all_to_all(const Request& request, const Await& await) {
  if (request.outputs.size() == 1 && group_->getSize() > 1) {
    const int64_t part = static_cast<int64_t>(request.inputs[0].nbytes()) / group_->getSize();
    const std::vector<int64_t> each(group_->getSize(), part);
    return {{exchange(bytes_of(request.outputs[0]), each, bytes_of(request.inputs[0]), each)}};
  }
  const std::vector<int64_t> in = byte_counts(request.outputs);
  const std::vector<int64_t> out = byte_counts(request.inputs);
  compare_counts(in, out, await);
  const at::Tensor output = room_for(total_bytes(in));
  return {{exchange(output, in, joined(bytes_of(request.inputs)), out)},
          [targets = bytes_of(request.outputs), output] { split_into(targets, output); }};
}

GlooCall GlooOps::gather(const Request& request, const Await& await) {
  const at::Tensor input = bytes_of(request.inputs[0]);
  std::vector<int64_t> out(group_->getSize());
  out[request.peer] = input.numel();
  std::vector<int64_t> in(group_->getSize());
  if (group_->getRank() == request.peer) in = byte_counts(request.outputs);
  compare_counts(in, out, await);
  const at::Tensor output = room_for(total_bytes(in));
  return {{exchange(output, in, input, out)},
          [targets = bytes_of(request.outputs), output] { split_into(targets, output); }};
}

GlooCall GlooOps::scatter(const Request& request, const Await& await) {
  std::vector<int64_t> in(group_->getSize());
  in[request.peer] = static_cast<int64_t>(request.outputs[0].nbytes());
  std::vector<int64_t> out(group_->getSize());
  if (group_->getRank() == request.peer) out = byte_counts(request.inputs);
  compare_counts(in, out, await);
  return {{exchange(bytes_of(request.outputs[0]), in, joined(bytes_of(request.inputs)), out)}};
}

GlooCall GlooOps::message(const Request& request) {
  const bool sends = request.what == Collective::Send;
  const at::Tensor& tensor = sends ? request.inputs[0] : request.outputs[0];
  uint32_t& count = (sends ? sent_ : received_)[request.peer];
  const uint32_t tag = peers_ == GlooPeers::Lockstep ? tag_of(TagKind::Message, count++, checksum_)
                                                     : static_cast<uint32_t>(request.tag);
  GlooLink link(group_, patience_);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  std::shared_ptr<Transfer> transfer = sends ? link.send(request.peer, tag, data_of(tensor), bytes)
                                             : link.recv(request.peer, tag, data_of(tensor), bytes);
  // A transfer cannot be polled, and a wait for it that times out closes every connection; so a
  // thread waits for it.
  return {{Worker::run_apart([transfer, group = group_, tensor] { transfer->wait(); })}};
}

GlooCall GlooOps::barrier() {
  c10d::BarrierOptions options;
  options.timeout = patience_;
  next_tag();
  const std::lock_guard lock(group_->mutex());
  return {{group_->barrier(options)}};
}

}  // namespace lockstep::comm
