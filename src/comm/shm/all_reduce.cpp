// all_reduce and reduce over shared memory: in place, in one meeting, or as a pipeline through
// slots.

#include "comm/reduce/slice.h"
#include "comm/shm/chunks.h"
#include "comm/shm/exchange.h"

namespace lockstep::comm {
namespace {

constexpr int64_t kChunk = Exchange::kChunk;
// Up to here every rank adds up everything itself: one meeting instead of three.
constexpr int64_t kOneShot = 64 << 10;

class AllReduce : public Operation {
 public:
  AllReduce(const Reduction& reduction, Piece data, int root)
      : reduction_(reduction), data_(data), element_(size_of(reduction.element)), root_(root) {}

 private:
  bool in_group_memory() const { return announcement.segment >= 0; }
  bool one_shot() const { return data_.bytes <= kOneShot; }

  bool uses_slots() const override { return !in_group_memory(); }
  void stage(Exchange& exchange) override {
    if (!in_group_memory()) fill(exchange, 0);
  }

  bool step(Exchange& exchange) override {
    if (round_ == 0) {
      if (step_of_nodes_ > 0) return step_by_nodes(exchange);
      if (exchange.all_in_group_memory(sequence)) {
        if (exchange.numa_nodes().help_all_reduce() && data_.bytes >= NumaNodes::kLeastBytes)
          return step_by_nodes(exchange);
        run_in_place(exchange);
        return true;
      }
      round_ = 1;
      if (!exchange.none_in_group_memory(sequence)) {
        // Ranks with data in group memory did not know that the others' is private, and have staged
        // nothing yet.
        if (in_group_memory()) fill(exchange, 0);
        meet(exchange);
      }
    }
    if (!one_shot()) return step_two_shot(exchange);
    if (meets_ && !exchange.channel().all_met()) return false;
    run_one_shot(exchange);
    return true;
  }

  void meet(Exchange& exchange) {
    exchange.channel().arrive();
    meets_ = true;
  }

  bool step_by_nodes(Exchange& exchange) {
    const NumaNodes& nodes = exchange.numa_nodes();
    std::vector<char*> parts(exchange.size());
    for (int r = 0; r < exchange.size(); ++r) parts[r] = exchange.part_of(r, sequence);
    const int64_t count = data_.bytes / element_;
    for (;; ++step_of_nodes_) {
      if (meets_ && !exchange.channel().all_met()) return false;
      if (step_of_nodes_ == 0) nodes.sum_within(reduction_, parts, count);
      if (step_of_nodes_ == 1) nodes.sum_between(reduction_, parts, count);
      if (step_of_nodes_ == 2) break;
      meet(exchange);
    }
    nodes.copy_from_others(reduction_, parts, count);
    return true;
  }

  // Each rank reduces its slice of all ranks' buffers, and writes it to all.
  void run_in_place(Exchange& exchange) const {
    const int size = exchange.size();
    const Range slice = slice_of(exchange.rank(), size, data_.bytes / element_, element_);
    std::vector<void*> parts(size);
    for (int r = 0; r < size; ++r)
      parts[r] = exchange.part_of(r, sequence) + slice.begin * element_;
    reduce(reduction_, parts.data(), size, parts.data(), size, slice.end - slice.begin);
  }

  // Elements of `chunk` that this rank copies for the others: all, or all but the slice it reduces
  // itself.
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
    const Range s =
        slice_of(exchange.rank(), exchange.size(), (bytes.end - bytes.begin) / element_, element_);
    return {s.begin * element_, s.end * element_};
  }

  void run_one_shot(Exchange& exchange) const {
    if (root_ < 0 || root_ == exchange.rank()) {
      void* target = data_.data;
      reduce(reduction_, exchange.slots(exchange.turn), exchange.size(), &target, 1,
             data_.bytes / element_);
    }
    ++exchange.turn;
  }

  // A pipeline of three stages a chunk: copied in, reduced slice by slice into the result slot,
  // copied out. In each round one chunk is in each stage, and one meeting ends the round.
  bool step_two_shot(Exchange& exchange) {
    const bool wanted = root_ < 0 || root_ == exchange.rank();
    const int64_t count = chunks_in(data_.bytes, kChunk);
    for (;;) {
      if (meets_ && !exchange.channel().all_met()) return false;
      if (round_ < count) fill(exchange, round_);
      if (round_ <= count) reduce_own_slice(exchange, round_ - 1, wanted);
      if (round_ >= 2 && wanted) copy_out(exchange, round_ - 2);
      if (round_ > count) break;
      ++round_;
      meet(exchange);
    }
    exchange.turn += count;
    return true;
  }

  void reduce_own_slice(Exchange& exchange, int64_t chunk, bool wanted) const {
    const Range bytes = chunk_of(data_.bytes, chunk, kChunk);
    const Range mine = own_slice(exchange, bytes);
    std::vector<const void*> sources(exchange.size());
    for (int r = 0; r < exchange.size(); ++r)
      sources[r] = exchange.slot(r, exchange.turn + chunk) + mine.begin;
    char* own = data_.data + bytes.begin + mine.begin;
    sources[exchange.rank()] = own;
    void* targets[] = {exchange.result(exchange.turn + chunk) + mine.begin, own};
    reduce(reduction_, sources.data(), exchange.size(), targets, wanted ? 2 : 1,
           (mine.end - mine.begin) / element_);
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
  int root_;           // -1: all ranks get the result
  int64_t round_ = 0;  // 0: not begun
  int step_of_nodes_ = 0;
  bool meets_ = false;
};

std::shared_ptr<Operation> made(const Reduction& reduction, Piece data, int root) {
  auto operation = std::make_shared<AllReduce>(reduction, data, root);
  operation->announcement.own_bytes = data.bytes;
  return operation;
}

}  // namespace

std::shared_ptr<Operation> all_reduce(const Reduction& reduction, Piece data) {
  return made(reduction, data, -1);
}

std::shared_ptr<Operation> reduce_to(int root, const Reduction& reduction, Piece data) {
  return made(reduction, data, root);
}

}  // namespace lockstep::comm
