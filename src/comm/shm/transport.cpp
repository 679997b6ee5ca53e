#include "comm/shm/transport.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstring>

#include "comm/host/numa_node.h"
#include "comm/reduce/reduction.h"
#include "comm/shm/exchange.h"
#include "comm/shm/group_memory.h"
#include "comm/shm/offer.h"
#include "comm/shm/segment.h"
#include "comm/text.h"
#include "core/hash/mix.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using std::chrono::milliseconds;

Piece piece_of(const at::Tensor& tensor) {
  return {data_of(tensor), static_cast<int64_t>(tensor.nbytes())};
}

// What owns the memory that an operation uses.
std::shared_ptr<void> tensors_of(Request&& request) {
  using Tensors = std::vector<at::Tensor>;
  return std::make_shared<std::pair<Tensors, Tensors>>(std::move(request.inputs),
                                                       std::move(request.outputs));
}

// One contiguous tensor as `count` equal parts, or the list as it is.
std::vector<Piece> pieces_of(const std::vector<at::Tensor>& tensors, int count) {
  std::vector<Piece> pieces;
  if (tensors.size() == 1) {
    const Piece whole = piece_of(tensors.front());
    for (int r = 0; r < count; ++r)
      pieces.push_back({whole.data + whole.bytes / count * r, whole.bytes / count});
  } else {
    for (const at::Tensor& tensor : tensors) pieces.push_back(piece_of(tensor));
  }
  return pieces;
}

// The counts of a list that is the same on all ranks, as one number.
uint64_t hash_of(const std::vector<Piece>& pieces) {
  uint64_t hash = 0;
  for (const Piece& piece : pieces)
    hash = (hash ^ static_cast<uint64_t>(piece.bytes)) * 0x9e3779b97f4a7c15;
  return hash;
}

// What has no room ends in a hash of it all.
template <size_t N>
void set_list(char (&to)[N], const std::string& text) {
  if (text.size() < N) return set_text(to, text);
  const std::string end = fmt::format("... (hash {:08x})", fnv1a<uint32_t>(text));
  set_text(to, text.substr(0, N - 1 - end.size()) + end);
}

class ShmTransport;

// Of an Operation or of a Message.
template <class Call>
class ShmPending : public Pending {
 public:
  ShmPending(std::shared_ptr<Exchange> exchange, std::shared_ptr<Call> call)
      : exchange_(std::move(exchange)), call_(std::move(call)) {}

 private:
  void finish() override { exchange_->finish(call_); }
  bool finish_within(std::chrono::microseconds limit) override {
    return exchange_->finish(call_, Exchange::Clock::now() + limit);
  }
  bool advance() override { return exchange_->advance(call_); }
  std::shared_ptr<Exchange> exchange_;
  std::shared_ptr<Call> call_;
};

class ShmTransport : public Transport {
 public:
  // `segment` is mapped by all ranks; closes its handle once they have it.
  ShmTransport(Segment segment, int rank, int size, ShmOptions options)
      : segment_(std::make_shared<Segment>(std::move(segment))),
        options_(std::move(options)),
        index_(options_.index ? options_.index : std::make_shared<GroupMemoryIndex>()) {
    // The operations of an abandoned Work may outlive the transport: they own the segment with the
    // exchange.
    exchange_ = std::shared_ptr<Exchange>(
        new Exchange(segment_->data(), rank, size, options_.timeout, options_.launcher_status,
                     options_.members, options_.called, options_.processes,
                     own_numa_node().value_or(-1)),
        [segment = segment_](Exchange* exchange) { delete exchange; });
    segment_->close_handle();
    segment_->populate(exchange_->slot(rank, 0) - segment_->data(), 2 * Exchange::kChunk);
    exchange_->set_group_memory([index = index_](int64_t id, int r) { return index->part(id, r); });
  }

  std::string_view name() const override { return "shm"; }
  int rank() const override { return exchange_->rank(); }
  int size() const override { return exchange_->size(); }
  milliseconds timeout() const override { return options_.timeout; }
  bool deterministic() const override { return true; }

  Work start(Request&& request) override {
    if (request.what == Collective::Send || request.what == Collective::Recv)
      return start_message(std::move(request));
    std::shared_ptr<Operation> operation = operation_for(request);
    Announcement& said = operation->announcement;
    set_text(said.what, request.name());
    if (request.step_of) {
      said.count = request.step_of->count;
      said.root = request.step_of->root;
    }
    if (const std::string counts = list_of(request); !counts.empty()) {
      set_list(said.list, counts);
      said.counts_hash = mix(said.counts_hash ^ fnv1a<uint64_t>(counts));
    }
    if (request.divide_by != 0) {
      said.divide_by = request.divide_by;
      said.counts_hash = mix(said.counts_hash ^ static_cast<uint64_t>(request.divide_by));
    }
    set_text(said.label, request.label);
    said.caller = request.context.number;
    said.pass = request.context.pass;
    if (said.caller != 0) set_text(said.caller_name, request.context.name);
    if (!request.advice.empty()) set_text(said.advice, request.advice);
    if (request.what != Collective::Barrier) set_text(said.dtype, name_of(request.dtype()));
    operation->timeout = request.timeout;
    operation->call = request.call;
    operation->keep = tensors_of(std::move(request));
    exchange_->start(operation);
    return Work(std::make_shared<ShmPending<Operation>>(exchange_, std::move(operation)));
  }

  void move_on() override { exchange_->move_on(); }

  at::Tensor empty(at::IntArrayRef sizes, at::TensorOptions options) override {
    const int64_t bytes = bytes_of(sizes, options);
    if (bytes == 0) return at::zeros(sizes, options);
    const auto [begin, end] = GroupMemory::own_extent(bytes, rank(), size());
    Segment segment = segment_of_all("empty", sizes, options, GroupMemory::bytes_for(bytes, size()),
                                     {begin, end});
    char* own = segment.data() + begin;
    auto memory = not_for_children(std::make_shared<GroupMemory>(std::move(segment), ++memories_,
                                                                 bytes, rank(), size(), index_));
    return at::from_blob(
        own, sizes, [memory](void*) {}, options);
  }

  at::Tensor shared(at::IntArrayRef sizes, at::TensorOptions options) override {
    const int64_t bytes = bytes_of(sizes, options);
    if (bytes == 0) return at::zeros(sizes, options);
    const Range own = Shard{rank(), size()}.of(bytes);
    auto segment = not_for_children(
        std::make_shared<Segment>(segment_of_all("shared", sizes, options, bytes, own)));
    return at::from_blob(
        segment->data(), sizes, [segment](void*) {}, options);
  }

  void abort_all(std::string_view why) noexcept override { exchange_->channel().abort_all(why); }
  std::optional<std::string> failure() override { return exchange_->channel().failure(); }
  WatchedProcesses processes() const override { return exchange_->channel().processes(); }

  // Ranks show each other what a message would bring too late, behind those of the program.
  std::shared_ptr<Transport> subset(const std::vector<int>& members, int) override {
    const int size = static_cast<int>(members.size());
    const int new_rank =
        static_cast<int>(std::find(members.begin(), members.end(), rank()) - members.begin());
    Segment segment;
    ShmOptions options{.timeout = options_.timeout, .launcher_status = options_.launcher_status};
    for (int member : members) {
      options.members.push_back(options_.members[member]);
      options.doors.push_back(options_.doors[member]);
      options.processes.push_back(exchange_->channel().processes()[member]);
      if (!options_.called.empty()) options.called.push_back(options_.called[member]);
    }
    Offer mine{};
    if (new_rank == 0) {
      mine = make_offer(segment, Exchange::bytes_for(size), others_of(options.doors));
    } else {
      const Offer offer = shown_by(members[0]);
      try {
        segment = attached(offer);
      } catch (const CommError& error) {
        set_text(mine.problem, error.what());
      }
    }
    exchange_->channel().show(number_of_subset(),
                              {reinterpret_cast<const char*>(&mine), sizeof mine});
    // Else the others would wait in the new group for a rank that cannot join it.
    for (const int member : members) {
      if (const Offer theirs = shown_by(member); theirs.problem[0]) throw CommError(theirs.problem);
    }
    return std::make_shared<ShmTransport>(std::move(segment), new_rank, size, std::move(options));
  }

 private:
  std::shared_ptr<Operation> operation_for(const Request& request) {
    const Reduction reduction = reduction_of(request, size());
    const auto with_counts = [](std::shared_ptr<Operation> operation,
                                const std::vector<Piece>& counts, int64_t count) {
      operation->announcement.counts_hash = hash_of(counts);
      operation->announcement.count = count;
      return operation;
    };
    const auto rooted = [&](std::shared_ptr<Operation> operation, int64_t count) {
      operation->announcement.root = exchange_->channel().name_of(request.peer);
      operation->announcement.count = count;
      return operation;
    };
    const auto inputs = [&] { return pieces_of(request.inputs, size()); };
    const auto outputs = [&] { return pieces_of(request.outputs, size()); };
    switch (request.what) {
      case Collective::AllReduce: {
        const at::Tensor& data = request.outputs.front();
        auto operation = comm::all_reduce(reduction, piece_of(data));
        operation->announcement.count = data.numel();
        in_group_memory(*operation, piece_of(data), data);
        return operation;
      }
      case Collective::Reduce:
        return rooted(reduce_to(request.peer, reduction, piece_of(request.outputs.front())),
                      request.outputs.front().numel());
      case Collective::ReduceScatter: {
        const std::vector<Range> everybody{{0, size()}};
        auto operation = comm::reduce_scatter(reduction, list(request.outputs), inputs(),
                                              request.runs.empty() ? everybody : request.runs);
        in_group_memory(*operation, whole_of(request.inputs), request.inputs.front());
        return with_counts(std::move(operation), inputs(), total(request.inputs));
      }
      case Collective::AllGather: {
        auto operation = comm::all_gather(outputs(), piece_of(request.inputs.front()));
        in_group_memory(*operation, piece_of(request.inputs.front()), request.inputs.front());
        return with_counts(std::move(operation), outputs(), total(request.outputs));
      }
      case Collective::Broadcast:
        return rooted(comm::broadcast(request.peer, rank(), piece_of(request.outputs.front())),
                      request.outputs.front().numel());
      case Collective::Gather:
        return rooted(comm::gather(request.peer, rank(), list(request.outputs),
                                   piece_of(request.inputs.front())),
                      -1);
      case Collective::Scatter:
        return rooted(comm::scatter(request.peer, rank(), piece_of(request.outputs.front()),
                                    list(request.inputs)),
                      -1);
      case Collective::AllToAll: {
        auto operation = comm::all_to_all(outputs(), inputs());
        operation->announcement.count = -1;
        return operation;
      }
      default:
        return comm::barrier();
    }
  }

  // Announces where in group memory the tensors lie, of which `first` is one, if they lie there one
  // after another.
  void in_group_memory(Operation& operation, const Piece& whole, const at::Tensor& first) const {
    if (whole.bytes < 0) return;
    // Without elements there is no address; the storage says whether the others have to wait for
    // private data.
    const void* address = whole.bytes > 0 ? whole.data : first.storage().data();
    if (const auto place = index_->find(address, whole.bytes, rank())) {
      operation.announcement.segment = place->segment;
      operation.announcement.offset = place->offset;
    }
  }

  // All elements of tensors that follow each other, where empty ones lie anywhere; -1 bytes when
  // they do not.
  static Piece whole_of(const std::vector<at::Tensor>& tensors) {
    Piece whole;
    for (const Piece& piece : list(tensors)) {
      if (piece.bytes == 0) continue;
      if (whole.bytes == 0) whole.data = piece.data;
      if (piece.data != whole.data + whole.bytes) return {nullptr, -1};
      whole.bytes += piece.bytes;
    }
    return whole;
  }

  static std::vector<Piece> list(const std::vector<at::Tensor>& tensors) {
    std::vector<Piece> pieces;
    for (const at::Tensor& tensor : tensors) pieces.push_back(piece_of(tensor));
    return pieces;
  }

  static int64_t total(const std::vector<at::Tensor>& tensors) {
    int64_t count = 0;
    for (const at::Tensor& tensor : tensors) count += tensor.numel();
    return count;
  }

  Work start_message(Request request) {
    auto message = std::make_shared<Message>();
    const at::Tensor& tensor =
        request.what == Collective::Send ? request.inputs.front() : request.outputs.front();
    message->sending = request.what == Collective::Send;
    message->peer = request.peer;
    message->tag = request.tag;
    message->dtype = std::string(name_of(tensor.scalar_type()));
    message->count = tensor.numel();
    message->bytes = static_cast<int64_t>(tensor.nbytes());
    message->data = data_of(tensor);
    message->timeout = request.timeout;
    message->label = request.label;
    message->keep = tensors_of(std::move(request));
    exchange_->start(message);
    return Work(std::make_shared<ShmPending<Message>>(exchange_, std::move(message)));
  }

  static int64_t bytes_of(at::IntArrayRef sizes, const at::TensorOptions& options) {
    // More than any machine has; so many of every rank can still be counted.
    constexpr int64_t kMost = int64_t{1} << 50;
    const int64_t count = c10::multiply_integers(sizes);
    const int64_t bytes = count * static_cast<int64_t>(options.dtype().itemsize());
    return count == 0 ? 0 : page_rounded(std::min(bytes, kMost));
  }

  // The same on all ranks, which have come from the same collectives to this one.
  uint32_t number_of_subset() { return exchange_->channel().next_sequence(); }

  Offer shown_by(int member) {
    static_assert(sizeof(Offer) <= RankBlock::kShown);
    Channel& channel = exchange_->channel();
    Offer offer{};
    std::memcpy(&offer,
                channel.see(member, number_of_subset(),
                            fmt::format("split: the memory of rank {}", channel.name_of(member)),
                            {options_.timeout}),
                sizeof offer);
    return offer;
  }

  // Mapped by every rank; this one gives its `own` bytes their pages.
  Segment segment_of_all(std::string_view what, at::IntArrayRef sizes,
                         const at::TensorOptions& options, int64_t bytes, Range own) {
    Segment segment;
    Offer offer{};
    if (rank() == 0) offer = make_offer(segment, bytes, others_of(options_.doors));
    share(offer, what, c10::typeMetaToScalarType(options.dtype()), c10::multiply_integers(sizes));
    if (offer.handle.bytes < 0) throw CommError(offer.problem);
    try {
      if (rank() != 0) segment = attached(offer);
      segment.populate(own.begin, own.end - own.begin);
    } catch (const CommError& error) {
      exchange_->channel().fail(error.what());  // the others wait for this rank
    }
    meet(what);
    segment.close_handle();
    return segment;
  }

  // Rank 0's offer, on every rank.
  void share(Offer& offer, std::string_view what, at::ScalarType dtype, int64_t count) {
    auto operation = comm::broadcast(0, rank(), {reinterpret_cast<char*>(&offer), sizeof offer});
    set_text(operation->announcement.what, what);
    set_text(operation->announcement.dtype, name_of(dtype));
    operation->announcement.count = count;
    finish(std::move(operation));
  }

  void meet(std::string_view what) {
    auto operation = comm::barrier();
    set_text(operation->announcement.what, what);
    finish(std::move(operation));
  }

  void finish(std::shared_ptr<Operation> operation) {
    operation->timeout = options_.timeout;
    exchange_->start(operation);
    exchange_->finish(operation);
  }

  std::shared_ptr<Segment> segment_;
  ShmOptions options_;
  std::shared_ptr<GroupMemoryIndex> index_;
  std::shared_ptr<Exchange> exchange_;
  int64_t memories_ = 0;
};

constexpr const char* kSegment = "segment";

// What rank 0 offers. The store does not say that its process has ended: where it is watched, it is
// looked at now and then.
std::string offered(const Store& store, int rank, const ShmOptions& options) {
  constexpr milliseconds kSlice{100};
  const Process* const first = options.processes.empty() ? nullptr : options.processes[0].get();
  if (first == nullptr) return store.get(kSegment, options.timeout);
  const auto until = std::chrono::steady_clock::now() + options.timeout;
  for (;;) {
    const bool has_ended = first->has_ended();  // before the look at what it has left
    try {
      return store.get(kSegment, kSlice);
    } catch (const CommError&) {
      if (store.launcher_status()->has_reported()) throw;
      if (store.check({kSegment})) continue;
      if (!has_ended && std::chrono::steady_clock::now() < until) continue;
      if (!has_ended) throw;
    }
    const auto name = [&](int r) { return options.called.empty() ? r : options.called[r]; };
    throw CommError(
        fmt::format("[shm] start on rank {} cannot go on: rank {} (process {}) has ended",
                    name(rank), name(0), first->pid()));
  }
}

}  // namespace

std::shared_ptr<Transport> make_shm_transport(const Store& store, int rank, int size,
                                              ShmOptions options) {
  Exchange::check_size(size);
  options.launcher_status = store.launcher_status();
  Segment segment;
  if (rank == 0) {
    const Offer offer = make_offer(segment, Exchange::bytes_for(size), others_of(options.doors));
    store.set(kSegment, {reinterpret_cast<const char*>(&offer), sizeof offer});
    if (offer.handle.bytes < 0) throw CommError(offer.problem);
  } else {
    const std::string text = offered(store, rank, options);
    Offer offer;
    if (text.size() != sizeof offer)
      throw CommError("[shm] the store's key 'segment' was written by another version");
    std::memcpy(&offer, text.data(), sizeof offer);
    segment = attached(offer);
  }
  return std::make_shared<ShmTransport>(std::move(segment), rank, size, std::move(options));
}

}  // namespace lockstep::comm
