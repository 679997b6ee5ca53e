#include "comm/net/ops.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/net/frame.h"
#include "core/divided_up.h"

namespace lockstep::comm::net {
namespace {

// Of a broadcast's slices, so that they are passed on while the next are under way.
constexpr int64_t kPiece = 256 << 10;
// Chunks of a slice for which this rank has room at a time.
constexpr int64_t kWindow = 4;
// Of the sums, among the messages from one rank to another.
constexpr uint32_t kSums = uint32_t{1} << 30;

int64_t pieces_in(int64_t bytes, int64_t each) { return divided_up(bytes, each); }

Span piece(const Span& whole, int64_t index, int64_t count) {
  // Whole cache lines.
  const int64_t each = (whole.bytes / count + 63) / 64 * 64;
  const int64_t begin = std::min(whole.bytes, index * each);
  const int64_t end = index + 1 == count ? whole.bytes : std::min(whole.bytes, begin + each);
  return {whole.data + begin, end - begin};
}

void broadcast_down(const NetPort& port, int root, Span data) {
  const int size = port.size();
  const int place = (port.rank() - root + size) % size;
  int below = 1;  // children are at place + 1, 2, 4, ... below this
  while (place == 0 ? below < size : (place & below) == 0) below *= 2;
  const auto pass_on = [port, size, place, below, root, data] {
    for (int step = below / 2; step > 0; step /= 2) {
      if (place + step < size) port.send((place + step + root) % size, 0, data.data, data.bytes);
    }
  };
  if (place == 0) return pass_on();
  port.recv((place - below + root) % size, 0, data.data, data.bytes, pass_on);
}

void broadcast_slices(const NetPort& port, int root, Span data) {
  const int size = port.size(), rank = port.rank();
  const int others = size - 1;
  // The i-th rank that is not the root.
  const auto other = [&](int i) { return i < root ? i : i + 1; };
  int64_t most = 0;
  for (int i = 0; i < others; ++i) most = std::max(most, piece(data, i, others).bytes);
  const int64_t count = pieces_in(most, kPiece);
  const auto part_of = [&](int i, int64_t k) {
    const Span slice = piece(data, i, others);
    const int64_t begin = std::min(slice.bytes, k * kPiece);
    return Span{slice.data + begin, std::min(kPiece, slice.bytes - begin)};
  };
  for (int64_t k = 0; k < count; ++k) {
    for (int i = 0; i < others; ++i) {
      const Span part = part_of(i, k);
      const int owner = other(i);
      const auto number = static_cast<uint32_t>(k);
      if (part.bytes == 0) continue;
      if (rank == root) {
        port.send(owner, number, part.data, part.bytes);
      } else if (rank != owner) {
        port.recv(owner, number, part.data, part.bytes);
      } else {
        port.recv(root, number, part.data, part.bytes, [port, root, part, number] {
          for (int step = 1; step < port.size(); ++step) {
            const int to = (port.rank() + step) % port.size();
            if (to != root) port.send(to, number, part.data, part.bytes);
          }
        });
      }
    }
  }
}

void barrier_round(const NetPort& port, int distance, uint32_t round) {
  const int size = port.size();
  if (distance >= size) return;
  port.send((port.rank() + distance) % size, round, nullptr, 0);
  port.recv((port.rank() - distance + size) % size, round, nullptr, 0,
            [port, distance, round] { barrier_round(port, 2 * distance, round + 1); });
}

// One rank's part in a reduction, kept by what is still to come.
class Reducing : public std::enable_shared_from_this<Reducing> {
 public:
  Reducing(const NetPort& port, std::shared_ptr<const Direct> direct, DirectCall call)
      : port_(port),
        direct_(std::move(direct)),
        call_(std::move(call)),
        chunk_(Direct::chunk_bytes(call_.bytes)),
        slice_(call_.bytes[static_cast<size_t>(port.rank())]),
        window_(std::min(kWindow, pieces_in(slice_, chunk_))),
        stride_((std::min(chunk_, slice_) + 63) / 64 * 64),
        foreign_(direct_->owners().size() - call_.parts.size()),
        scratch_(new char[static_cast<size_t>(window_ * stride_) * foreign_ + 1]),
        missing_(static_cast<size_t>(window_)) {
    nodes_of_.resize(static_cast<size_t>(port.size()));
    for (const int owner : direct_->owners()) ++nodes_of_[static_cast<size_t>(owner)];
  }

  void begin() {
    const int rank = port_.rank(), size = port_.size();
    const int64_t most = *std::max_element(call_.bytes.begin(), call_.bytes.end());
    for (int s = 0; s < static_cast<int>(call_.results.size()); ++s) {
      char* const result = call_.results[static_cast<size_t>(s)];
      if (s == rank || result == nullptr) continue;
      const int64_t bytes = call_.bytes[static_cast<size_t>(s)];
      for (int64_t at = 0; at < bytes; at += chunk_) {
        port_.recv(s, kSums + static_cast<uint32_t>(at / chunk_), result + at,
                   std::min(chunk_, bytes - at));
      }
    }
    for (int64_t k = 0; k < window_; ++k) post(k);
    for (int64_t at = 0; at < most; at += chunk_) {
      for (int i = 1; i < size; ++i) {
        const int s = (rank + i) % size;
        const int64_t bytes = call_.bytes[static_cast<size_t>(s)];
        if (at >= bytes) continue;
        for (size_t j = 0; j < call_.parts.size(); ++j) {
          port_.send(s, part_of(at / chunk_, j, call_.parts.size()),
                     call_.parts[j][static_cast<size_t>(s)] + at, std::min(chunk_, bytes - at));
        }
      }
    }
  }

 private:
  static uint32_t part_of(int64_t chunk, size_t node, size_t nodes) {
    return static_cast<uint32_t>(static_cast<size_t>(chunk) * nodes + node);
  }
  int64_t bytes(int64_t k) const { return std::min(chunk_, slice_ - k * chunk_); }
  char* place(int64_t k, size_t foreign) const {
    return scratch_.get() +
           (static_cast<size_t>(k % window_) * foreign_ + foreign) * static_cast<size_t>(stride_);
  }

  void post(int64_t k) {
    const auto slot = static_cast<size_t>(k % window_);
    missing_[slot] = foreign_ + 1;
    std::vector<size_t> seen(nodes_of_.size());
    size_t foreign = 0;
    for (const int owner : direct_->owners()) {
      if (owner == port_.rank()) continue;
      const auto member = static_cast<size_t>(owner);
      port_.recv(owner, part_of(k, seen[member]++, nodes_of_[member]), place(k, foreign++),
                 bytes(k), [self = shared_from_this(), k] { self->one_more(k); });
    }
    one_more(k);
  }

  void one_more(int64_t k) {
    if (--missing_[static_cast<size_t>(k % window_)] > 0) return;
    std::vector<const void*> parts;
    size_t own = 0, foreign = 0;
    for (const int owner : direct_->owners()) {
      parts.push_back(owner == port_.rank()
                          ? call_.parts[own++][static_cast<size_t>(port_.rank())] + k * chunk_
                          : place(k, foreign++));
    }
    char* const sum = call_.sum + k * chunk_;
    direct_->tree().sum(call_.reduction, parts.data(), {sum},
                        bytes(k) / size_of(call_.reduction.element));
    for (const int taker : call_.takers) {
      port_.send(taker, kSums + static_cast<uint32_t>(k), sum, bytes(k));
    }
    if ((k + window_) * chunk_ < slice_) post(k + window_);
  }

  const NetPort port_;
  const std::shared_ptr<const Direct> direct_;
  // Its own: the waiter lets go of the call when it fails, perhaps in the middle of a step.
  const DirectCall call_;
  const int64_t chunk_, slice_, window_, stride_;
  const size_t foreign_;
  const std::unique_ptr<char[]> scratch_;
  std::vector<size_t> missing_;
  std::vector<size_t> nodes_of_;
};

}  // namespace

void exchange(const NetPort& port, const std::vector<Span>& in, const std::vector<Span>& out) {
  const int size = port.size(), rank = port.rank();
  const Span& own_in = in[static_cast<size_t>(rank)];
  const Span& own_out = out[static_cast<size_t>(rank)];
  if (own_in.bytes > 0 && own_in.data != own_out.data) {
    std::memcpy(own_in.data, own_out.data, static_cast<size_t>(own_in.bytes));
  }
  for (int step = 1; step < size; ++step) {
    const int from = (rank - step + size) % size;
    const Span& span = in[static_cast<size_t>(from)];
    if (span.bytes >= 0) port.recv(from, 0, span.data, span.bytes);
  }
  for (int step = 1; step < size; ++step) {
    const int to = (rank + step) % size;
    const Span& span = out[static_cast<size_t>(to)];
    if (span.bytes >= 0) port.send(to, 0, span.data, span.bytes);
  }
}

void broadcast(const NetPort& port, int root, Span data) {
  if (data.bytes <= NetFrame::kMostEager || port.size() == 2) {
    broadcast_down(port, root, data);
  } else {
    broadcast_slices(port, root, data);
  }
}

void barrier(const NetPort& port) { barrier_round(port, 1, 0); }

void reduce(const NetPort& port, const std::shared_ptr<const Direct>& direct, DirectCall call) {
  std::make_shared<Reducing>(port, direct, std::move(call))->begin();
}

}  // namespace lockstep::comm::net
