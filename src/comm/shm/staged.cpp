// The operations but all_reduce: what each rank puts into its slot, and what it reads from the
// others'.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "comm/shm/chunks.h"
#include "comm/shm/exchange.h"

namespace lockstep::comm {
namespace {

// Slots are divided among ranks when each gets something else.
int64_t part_bytes(int size) { return Exchange::kChunk / size / 64 * 64; }

int64_t largest(const std::vector<Piece>& pieces) {
  int64_t most = 0;
  for (const Piece& piece : pieces) most = std::max(most, piece.bytes);
  return most;
}

// An operation in which each rank in turn fills its slot, waits for the others and reads theirs,
// chunk by chunk.
class Staged : public Operation {
 protected:
  virtual void fill(Exchange& exchange, int64_t chunk, char* slot) = 0;
  virtual void read(Exchange& exchange, int64_t chunk) = 0;
  // The same on all ranks, from what all have announced.
  virtual int64_t chunks(Exchange& exchange) const = 0;
  // All that others need of every rank lies in group memory. False as for step().
  virtual bool step_in_place(Exchange&) { return true; }

  bool in_group_memory() const { return announcement.segment >= 0; }
  bool uses_slots() const override { return !in_group_memory(); }

  void stage(Exchange& exchange) override {
    if (!in_group_memory()) fill_first(exchange);
  }

  bool step(Exchange& exchange) override {
    if (count_ == 0) {
      if (in_group_memory() && exchange.all_in_group_memory(sequence))
        return step_in_place(exchange);
      count_ = chunks(exchange);
      if (!exchange.none_in_group_memory(sequence)) {
        // Some could not know that the others' data is private, and have staged nothing yet.
        if (in_group_memory()) fill_first(exchange);
        meet(exchange);
      }
    }
    for (;;) {
      if (meets_ && !exchange.channel().all_met()) return false;
      read(exchange, chunk_);
      ++exchange.turn;
      if (++chunk_ == count_) return true;
      fill(exchange, chunk_, exchange.slot(exchange.rank(), exchange.turn));
      meet(exchange);
    }
  }

  void meet(Exchange& exchange) {
    exchange.channel().arrive();
    meets_ = true;
  }

  void fill_first(Exchange& exchange) {
    fill(exchange, 0, exchange.slot(exchange.rank(), exchange.turn));
  }

  // The largest of the ranks' own counts of bytes.
  int64_t most_bytes(Exchange& exchange) const {
    int64_t most = 0;
    for (int r = 0; r < exchange.size(); ++r) {
      most = std::max(most, exchange.channel().announcement(r, sequence).own_bytes);
    }
    return most;
  }

  // Two ranks expect different sizes: both throw.
  [[noreturn]] void disagree(Exchange& exchange, int peer, int64_t theirs, int64_t expected) const {
    exchange.channel().fail(
        fmt::format("[shm] {}: {} gives {} bytes where {} expects {}. The sizes of a "
                    "part must agree on both sides",
                    announcement.text(sequence), exchange.channel().text_of(peer), theirs,
                    exchange.channel().text_of(exchange.rank()), expected));
  }

 private:
  int64_t count_ = 0;  // 0: not begun

 protected:
  int64_t chunk_ = 0;
  bool meets_ = false;
};

class ReduceScatter : public Staged {
 public:
  ReduceScatter(const Reduction& reduction, std::vector<Piece> outputs, std::vector<Piece> inputs,
                std::vector<Range> runs)
      : reduction_(reduction),
        outputs_(std::move(outputs)),
        inputs_(std::move(inputs)),
        runs_(std::move(runs)) {}

 private:
  int64_t chunks(Exchange& exchange) const override {
    return chunks_in(most_bytes(exchange), part_bytes(exchange.size()));
  }

  void fill(Exchange& exchange, int64_t chunk, char* slot) override {
    const int64_t each = part_bytes(exchange.size());
    for (int r = 0; r < exchange.size(); ++r) {
      if (r == exchange.rank()) continue;
      const Range s = chunk_of(inputs_[r].bytes, chunk, each);
      copy(slot + r * each, inputs_[r].data + s.begin, s.end - s.begin);
    }
  }

  void read(Exchange& exchange, int64_t chunk) override {
    const int64_t each = part_bytes(exchange.size());
    const int rank = exchange.rank();
    const Range s = chunk_of(inputs_[rank].bytes, chunk, each);
    std::vector<const void*> sources(exchange.size());
    for (int r = 0; r < exchange.size(); ++r)
      sources[r] = exchange.slot(r, exchange.turn) + rank * each;
    sources[rank] = inputs_[rank].data + s.begin;
    combine(sources, s);
  }

  bool step_in_place(Exchange& exchange) override {
    if (runs_.size() == 1 && exchange.numa_nodes().help_reduce_scatter() &&
        begin_of(exchange.size()) >= NumaNodes::kLeastBytes)
      return step_by_nodes(exchange);
    const Range everybody{0, exchange.size()};
    combine(inputs_of(exchange, everybody, exchange.rank(), 0),
            {0, inputs_[exchange.rank()].bytes});
    return true;
  }

  // Chunk by chunk: sums for ranks of other nodes into this rank's slot; after a meeting, the
  // result from the inputs of this node's ranks and the sums in other nodes' slots.
  bool step_by_nodes(Exchange& exchange) {
    const int64_t each = Exchange::kChunk / exchange.numa_nodes().most_given() / 64 * 64;
    const int64_t count = chunks_in(largest(inputs_), each);
    for (;; ++chunk_) {
      if (meets_ && !exchange.channel().all_met()) return false;
      if (chunk_ < count) give(exchange, each);
      if (chunk_ > 0) take(exchange, each);
      if (chunk_ == count) break;
      meet(exchange);
    }
    exchange.turn += count;
    return true;
  }

  void give(Exchange& exchange, int64_t each) const {
    const NumaNodes& nodes = exchange.numa_nodes();
    char* slot = exchange.slot(exchange.rank(), exchange.turn + chunk_);
    for (const NumaNodes::Given& one : nodes.given_by(exchange.rank())) {
      const Range s = chunk_of(inputs_[one.to].bytes, chunk_, each);
      const auto sources = inputs_of(exchange, one.ranks, one.to, s.begin);
      void* target = slot;
      reduce({reduction_.element, reduction_.combine}, sources.data(),
             static_cast<int>(sources.size()), &target, 1, s.size() / size_of(reduction_.element));
      slot += each;
    }
  }

  void take(Exchange& exchange, int64_t each) const {
    const NumaNodes& nodes = exchange.numa_nodes();
    const Range s = chunk_of(inputs_[exchange.rank()].bytes, chunk_ - 1, each);
    std::vector<const void*> sources;
    for (const NumaNodes::Taken& one : nodes.taken()) {
      sources.push_back(one.index < 0 ? inputs_of(exchange, one.ranks, exchange.rank(), s.begin)[0]
                                      : exchange.slot(one.from, exchange.turn + chunk_ - 1) +
                                            one.index * each);
    }
    nodes.tree_of_taken().sum(reduction_, sources.data(), {outputs_[0].data + s.begin},
                              s.size() / size_of(reduction_.element));
  }

  // What `ranks` have for rank `to`, from byte `begin` on. In group memory the inputs of a rank lie
  // one after another.
  std::vector<const void*> inputs_of(const Exchange& exchange, Range ranks, int to,
                                     int64_t begin) const {
    std::vector<const void*> inputs;
    begin += begin_of(to);
    for (int64_t r = ranks.begin; r < ranks.end; ++r)
      inputs.push_back(exchange.part_of(static_cast<int>(r), sequence) + begin);
    return inputs;
  }
  int64_t begin_of(int part) const {
    int64_t bytes = 0;
    for (int r = 0; r < part; ++r) bytes += inputs_[r].bytes;
    return bytes;
  }

  // `sources`: the ranks' bytes s of this rank's part. An output may be this rank's own input,
  // which only the run that this rank is in reads.
  void combine(const std::vector<const void*>& sources, Range s) const {
    for (size_t j = 0; j < runs_.size(); ++j) {
      void* target = outputs_[j].data + s.begin;
      reduce(reduction_, sources.data() + runs_[j].begin, static_cast<int>(runs_[j].size()),
             &target, 1, s.size() / size_of(reduction_.element));
    }
  }

  Reduction reduction_;
  std::vector<Piece> outputs_;
  std::vector<Piece> inputs_;
  std::vector<Range> runs_;
};

// Broadcast, gather and all_gather: some ranks' buffers go as they are to some ranks.
class Spread : public Staged {
 public:
  // outputs[r].data == nullptr: this rank does not want rank r's. `gives`: this rank contributes
  // data.
  Spread(std::vector<Piece> outputs, Piece input, bool gives)
      : outputs_(std::move(outputs)), input_(input), gives_(gives) {}

 private:
  int64_t chunks(Exchange& exchange) const override {
    return chunks_in(most_bytes(exchange), Exchange::kChunk);
  }

  void fill(Exchange&, int64_t chunk, char* slot) override {
    if (!gives_) return;
    const Range s = chunk_of(input_.bytes, chunk, Exchange::kChunk);
    copy(slot, input_.data + s.begin, s.end - s.begin);
  }

  void check_given(Exchange& exchange, int rank) const {
    const int64_t given = exchange.channel().announcement(rank, sequence).own_bytes;
    if (given != outputs_[rank].bytes) disagree(exchange, rank, given, outputs_[rank].bytes);
  }

  void read(Exchange& exchange, int64_t chunk) override {
    for (int r = 0; r < static_cast<int>(outputs_.size()); ++r) {
      const Piece& output = outputs_[r];
      if (output.data == nullptr) continue;
      check_given(exchange, r);
      const Range s = chunk_of(output.bytes, chunk, Exchange::kChunk);
      const char* from =
          r == exchange.rank() ? input_.data + s.begin : exchange.slot(r, exchange.turn);
      copy(output.data + s.begin, from, s.end - s.begin);
    }
  }

  bool step_in_place(Exchange& exchange) override {
    for (int r = 0; r < static_cast<int>(outputs_.size()); ++r) {
      const Piece& output = outputs_[r];
      check_given(exchange, r);
      copy(output.data, r == exchange.rank() ? input_.data : exchange.part_of(r, sequence),
           output.bytes);
    }
    return true;
  }

  std::vector<Piece> outputs_;
  Piece input_;
  bool gives_;
};

// Scatter and all_to_all: rank r has something else for each rank. The sizes go first, so that both
// sides know when they differ.
class Deal : public Staged {
 public:
  // Without inputs this rank gives nothing; an output without data takes nothing from that rank.
  Deal(std::vector<Piece> outputs, std::vector<Piece> inputs)
      : outputs_(std::move(outputs)), inputs_(std::move(inputs)) {}

 private:
  static constexpr int64_t kHeader = 64;

  int64_t chunks(Exchange& exchange) const override {
    return chunks_in(most_bytes(exchange), part_bytes(exchange.size()) - kHeader);
  }

  void fill(Exchange& exchange, int64_t chunk, char* slot) override {
    const int64_t each = part_bytes(exchange.size());
    for (int r = 0; r < static_cast<int>(inputs_.size()); ++r) {
      const Range s = chunk_of(inputs_[r].bytes, chunk, each - kHeader);
      std::memcpy(slot + r * each, &inputs_[r].bytes, sizeof(int64_t));
      copy(slot + r * each + kHeader, inputs_[r].data + s.begin, s.end - s.begin);
    }
  }

  void read(Exchange& exchange, int64_t chunk) override {
    const int64_t each = part_bytes(exchange.size());
    for (int r = 0; r < static_cast<int>(outputs_.size()); ++r) {
      const Piece& output = outputs_[r];
      if (output.data == nullptr) continue;
      const char* part = exchange.slot(r, exchange.turn) + exchange.rank() * each;
      int64_t given = 0;
      std::memcpy(&given, part, sizeof given);
      if (given != output.bytes) disagree(exchange, r, given, output.bytes);
      const Range s = chunk_of(output.bytes, chunk, each - kHeader);
      copy(output.data + s.begin, part + kHeader, s.end - s.begin);
    }
  }

  std::vector<Piece> outputs_;
  std::vector<Piece> inputs_;
};

class Barrier : public Operation {
 private:
  bool step(Exchange&) override { return true; }
};

template <class T, class... Args>
std::shared_ptr<Operation> made(int64_t own_bytes, Args&&... args) {
  auto operation = std::make_shared<T>(std::forward<Args>(args)...);
  operation->announcement.own_bytes = own_bytes;
  return operation;
}

}  // namespace

std::shared_ptr<Operation> reduce_scatter(const Reduction& reduction, std::vector<Piece> outputs,
                                          std::vector<Piece> inputs, std::vector<Range> runs) {
  const int64_t most = largest(inputs);
  return made<ReduceScatter>(most, reduction, std::move(outputs), std::move(inputs),
                             std::move(runs));
}

std::shared_ptr<Operation> all_gather(std::vector<Piece> outputs, Piece input) {
  return made<Spread>(input.bytes, std::move(outputs), input, true);
}

std::shared_ptr<Operation> broadcast(int root, int rank, Piece data) {
  if (rank == root) return made<Spread>(data.bytes, std::vector<Piece>(), data, true);
  std::vector<Piece> outputs(root + 1);
  outputs[root] = data;
  return made<Spread>(data.bytes, std::move(outputs), Piece(), false);
}

std::shared_ptr<Operation> gather(int root, int rank, std::vector<Piece> outputs, Piece input) {
  return made<Spread>(input.bytes, std::move(outputs), input, rank != root);
}

std::shared_ptr<Operation> scatter(int root, int rank, Piece output, std::vector<Piece> inputs) {
  std::vector<Piece> outputs(root + 1);
  outputs[root] = output;
  const int64_t most = rank == root ? largest(inputs) : output.bytes;
  return made<Deal>(most, std::move(outputs), std::move(inputs));
}

std::shared_ptr<Operation> all_to_all(std::vector<Piece> outputs, std::vector<Piece> inputs) {
  const int64_t most = std::max(largest(inputs), largest(outputs));
  return made<Deal>(most, std::move(outputs), std::move(inputs));
}

std::shared_ptr<Operation> barrier() { return std::make_shared<Barrier>(); }

}  // namespace lockstep::comm
