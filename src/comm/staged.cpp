// The operations themselves: what each rank puts into its slot, and what it reads from the others'.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "comm/exchange.h"

namespace lockstep::comm {
namespace {

constexpr int64_t kChunk = Exchange::kChunk;
// Up to here every rank adds up everything itself: one meeting instead of three.
constexpr int64_t kOneShot = 64 << 10;

void copy(char* to, const char* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

// The part of [0, bytes) in chunk `index` of chunks of `each` bytes.
Range chunk_of(int64_t bytes, int64_t index, int64_t each) {
  return {std::min(bytes, index * each), std::min(bytes, (index + 1) * each)};
}

int64_t chunks_in(int64_t bytes, int64_t each) { return std::max<int64_t>(1, (bytes + each - 1) / each); }

// Slots are divided among ranks when each gets something else.
int64_t part_bytes(int size) { return kChunk / size / 64 * 64; }

// An operation in which each rank in turn fills its slot, meets the others and reads theirs, chunk by chunk.
class Staged : public Operation {
 protected:
  virtual void fill(Exchange& exchange, int64_t chunk, char* slot) = 0;
  virtual void read(Exchange& exchange, int64_t chunk) = 0;
  // The same on all ranks, from what all have announced.
  virtual int64_t chunks(Exchange& exchange) const = 0;

  void stage(Exchange& exchange) override { fill(exchange, 0, exchange.slot(exchange.rank(), exchange.turn)); }

  void run(Exchange& exchange) override {
    const int64_t count = chunks(exchange);
    for (int64_t chunk = 0;;) {
      read(exchange, chunk);
      ++exchange.turn;
      if (++chunk == count) return;
      fill(exchange, chunk, exchange.slot(exchange.rank(), exchange.turn));
      exchange.channel().meet(sequence, timeout);
    }
  }

  bool is_short(Exchange& exchange) const override { return chunks(exchange) == 1; }

  // The largest of the ranks' own counts of bytes.
  int64_t most_bytes(Exchange& exchange) const {
    int64_t most = 0;
    for (int r = 0; r < exchange.size(); ++r) {
      most = std::max(most, exchange.channel().announcement(r, sequence).own_bytes);
    }
    return most;
  }

  // The sizes that two ranks see differ: both are told.
  [[noreturn]] void disagree(Exchange& exchange, int peer, int64_t theirs, int64_t expected) const {
    exchange.channel().fail(fmt::format(
        "[shm] {}: rank {} gives {} bytes where rank {} expects {}. The sizes of a part must agree on both sides",
        announcement.text(sequence), peer, theirs, exchange.rank(), expected));
  }
};

class AllReduce : public Operation {
 public:
  AllReduce(const Reduction& reduction, Piece data, int root)
      : reduction_(reduction), data_(data), element_(size_of(reduction.element)), root_(root) {}

 private:
  bool in_group_memory() const { return announcement.segment >= 0; }
  bool one_shot() const { return data_.bytes <= kOneShot; }

  bool uses_slots() const override { return !in_group_memory(); }
  bool is_short(Exchange& exchange) const override {
    if (exchange.all_in_group_memory(sequence)) return true;
    return one_shot() && !in_group_memory() && none_in_group_memory(exchange);
  }

  bool none_in_group_memory(Exchange& exchange) const {
    for (int r = 0; r < exchange.size(); ++r) {
      if (exchange.channel().announcement(r, sequence).segment >= 0) return false;
    }
    return true;
  }

  void stage(Exchange& exchange) override {
    if (!in_group_memory()) fill(exchange, 0);
  }

  void run(Exchange& exchange) override {
    if (exchange.all_in_group_memory(sequence)) return run_in_place(exchange);
    if (!none_in_group_memory(exchange)) {
      // Some could not know that the others' data is private, and have staged nothing yet.
      if (in_group_memory()) fill(exchange, 0);
      exchange.channel().meet(sequence, timeout);
    }
    if (one_shot()) {
      run_one_shot(exchange);
    } else {
      run_two_shot(exchange);
    }
  }

  // Each rank reduces its slice of all ranks' buffers, and writes it to all.
  void run_in_place(Exchange& exchange) const {
    const int size = exchange.size();
    const Range slice = slice_of(exchange.rank(), size, data_.bytes / element_, element_);
    std::vector<void*> parts(size);
    for (int r = 0; r < size; ++r) parts[r] = exchange.part_of(r, sequence) + slice.begin * element_;
    reduce(reduction_, parts.data(), size, parts.data(), size, slice.end - slice.begin);
  }

  // Elements of `chunk` that this rank copies for the others: all, or all but the slice it reduces itself.
  void fill(Exchange& exchange, int64_t chunk) const {
    char* slot = exchange.slot(exchange.rank(), exchange.turn + chunk);
    if (one_shot()) return copy(slot, data_.data, data_.bytes);
    const Range bytes = chunk_of(data_.bytes, chunk, kChunk);
    const char* from = data_.data + bytes.begin;
    const Range mine = own_slice(exchange, bytes);
    copy(slot, from, mine.begin);
    copy(slot + mine.end, from + mine.end, bytes.end - bytes.begin - mine.end);
  }

  // In bytes from the chunk's begin.
  Range own_slice(Exchange& exchange, Range bytes) const {
    const Range s = slice_of(exchange.rank(), exchange.size(), (bytes.end - bytes.begin) / element_, element_);
    return {s.begin * element_, s.end * element_};
  }

  void run_one_shot(Exchange& exchange) const {
    if (root_ < 0 || root_ == exchange.rank()) {
      std::vector<const void*> sources(exchange.size());
      for (int r = 0; r < exchange.size(); ++r) sources[r] = exchange.slot(r, exchange.turn);
      void* target = data_.data;
      reduce(reduction_, sources.data(), exchange.size(), &target, 1, data_.bytes / element_);
    }
    ++exchange.turn;
  }

  // A pipeline of three stages a chunk: copied in, reduced slice by slice into the result slot, copied out. In each round one chunk is in
  // each stage, and one meeting ends the round.
  void run_two_shot(Exchange& exchange) const {
    const bool wanted = root_ < 0 || root_ == exchange.rank();
    const int64_t count = chunks_in(data_.bytes, kChunk);
    for (int64_t round = 1; round <= count + 1; ++round) {
      if (round < count) fill(exchange, round);
      if (round <= count) reduce_own_slice(exchange, round - 1, wanted);
      if (round >= 2 && wanted) copy_out(exchange, round - 2);
      if (round <= count) exchange.channel().meet(sequence, timeout);
    }
    exchange.turn += count;
  }

  void reduce_own_slice(Exchange& exchange, int64_t chunk, bool wanted) const {
    const Range bytes = chunk_of(data_.bytes, chunk, kChunk);
    const Range mine = own_slice(exchange, bytes);
    std::vector<const void*> sources(exchange.size());
    for (int r = 0; r < exchange.size(); ++r) sources[r] = exchange.slot(r, exchange.turn + chunk) + mine.begin;
    char* own = data_.data + bytes.begin + mine.begin;
    sources[exchange.rank()] = own;
    void* targets[] = {exchange.result(exchange.turn + chunk) + mine.begin, own};
    reduce(reduction_, sources.data(), exchange.size(), targets, wanted ? 2 : 1, (mine.end - mine.begin) / element_);
  }

  void copy_out(Exchange& exchange, int64_t chunk) const {
    const Range bytes = chunk_of(data_.bytes, chunk, kChunk);
    const Range mine = own_slice(exchange, bytes);
    char* to = data_.data + bytes.begin;
    const char* from = exchange.result(exchange.turn + chunk);
    copy(to, from, mine.begin);
    copy(to + mine.end, from + mine.end, bytes.end - bytes.begin - mine.end);
  }

  Reduction reduction_;
  Piece data_;
  int64_t element_;
  int root_;  // -1: everybody gets the result
};

class ReduceScatter : public Staged {
 public:
  ReduceScatter(const Reduction& reduction, Piece output, std::vector<Piece> inputs)
      : reduction_(reduction), output_(output), inputs_(std::move(inputs)) {}

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
    const Range s = chunk_of(output_.bytes, chunk, each);
    std::vector<const void*> sources(exchange.size());
    for (int r = 0; r < exchange.size(); ++r) sources[r] = exchange.slot(r, exchange.turn) + rank * each;
    sources[rank] = inputs_[rank].data + s.begin;
    void* target = output_.data + s.begin;
    reduce(reduction_, sources.data(), exchange.size(), &target, 1, (s.end - s.begin) / size_of(reduction_.element));
  }

  Reduction reduction_;
  Piece output_;
  std::vector<Piece> inputs_;
};

// Broadcast, gather and all_gather: some ranks' buffers go as they are to some ranks.
class Spread : public Staged {
 public:
  // outputs[r].data == nullptr: this rank does not want rank r's. `gives`: this rank has something to say.
  Spread(std::vector<Piece> outputs, Piece input, bool gives)
      : outputs_(std::move(outputs)), input_(input), gives_(gives) {}

 private:
  int64_t chunks(Exchange& exchange) const override { return chunks_in(most_bytes(exchange), kChunk); }

  void fill(Exchange&, int64_t chunk, char* slot) override {
    if (!gives_) return;
    const Range s = chunk_of(input_.bytes, chunk, kChunk);
    copy(slot, input_.data + s.begin, s.end - s.begin);
  }

  void read(Exchange& exchange, int64_t chunk) override {
    for (int r = 0; r < static_cast<int>(outputs_.size()); ++r) {
      const Piece& output = outputs_[r];
      if (output.data == nullptr) continue;
      const int64_t given = exchange.channel().announcement(r, sequence).own_bytes;
      if (given != output.bytes) disagree(exchange, r, given, output.bytes);
      const Range s = chunk_of(output.bytes, chunk, kChunk);
      const char* from = r == exchange.rank() ? input_.data + s.begin : exchange.slot(r, exchange.turn);
      copy(output.data + s.begin, from, s.end - s.begin);
    }
  }

  std::vector<Piece> outputs_;
  Piece input_;
  bool gives_;
};

// Scatter and all_to_all: rank r has something else for each rank. The sizes go first, so that both sides know when they differ.
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
  bool is_short(Exchange&) const override { return true; }
  void run(Exchange&) override {}
};

template <class T, class... Args>
std::shared_ptr<Operation> made(int64_t own_bytes, Args&&... args) {
  auto operation = std::make_shared<T>(std::forward<Args>(args)...);
  operation->announcement.own_bytes = own_bytes;
  return operation;
}

int64_t largest(const std::vector<Piece>& pieces) {
  int64_t most = 0;
  for (const Piece& piece : pieces) most = std::max(most, piece.bytes);
  return most;
}

}  // namespace

std::shared_ptr<Operation> all_reduce(const Reduction& reduction, Piece data) {
  return made<AllReduce>(data.bytes, reduction, data, -1);
}

std::shared_ptr<Operation> reduce_to(int root, const Reduction& reduction, Piece data) {
  return made<AllReduce>(data.bytes, reduction, data, root);
}

std::shared_ptr<Operation> reduce_scatter(const Reduction& reduction, Piece output, std::vector<Piece> inputs) {
  const int64_t most = largest(inputs);
  return made<ReduceScatter>(most, reduction, output, std::move(inputs));
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
