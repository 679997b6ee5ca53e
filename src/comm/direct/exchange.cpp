#include "comm/direct/exchange.h"

#include <algorithm>

#include "core/divided_up.h"

namespace lockstep::comm {
namespace {

using Transfers = std::vector<std::unique_ptr<Transfer>>;

// Slices move in chunks, so that one is added up and passed on while the next are on the wire.
// docs/log.md has the measurement.
constexpr int64_t kLeastChunk = 256 << 10;
constexpr int64_t kMostChunk = 1 << 20;
// Chunks of a slice for which this rank has room at a time.
constexpr int64_t kWindow = 4;

std::vector<std::pair<Range, int>> sorted(const std::vector<std::vector<Range>>& nodes) {
  std::vector<std::pair<Range, int>> owned;
  for (size_t member = 0; member < nodes.size(); ++member) {
    for (const Range& node : nodes[member]) owned.emplace_back(node, static_cast<int>(member));
  }
  std::sort(owned.begin(), owned.end(),
            [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
  return owned;
}

std::vector<Range> nodes_of(const std::vector<std::pair<Range, int>>& owned) {
  std::vector<Range> nodes;
  for (const auto& [node, owner] : owned) nodes.push_back(node);
  return nodes;
}

void wait_for(Transfers& transfers) {
  for (const auto& transfer : transfers) transfer->wait();
  transfers.clear();
}

}  // namespace

// The chunks of this member's slice that others bring, in a window of scratch memory.
class Direct::Incoming {
 public:
  Incoming(const Direct& direct, Link& link, const DirectCall& call, int64_t chunk)
      : direct_(direct),
        link_(link),
        call_(call),
        chunk_(chunk),
        slice_(call.bytes[link.rank()]),
        window_(std::min(kWindow, divided_up(slice_, chunk))),
        stride_(std::min(chunk, slice_)),
        foreign_(direct.owners_.size() - call.parts.size()),
        scratch_(new char[window_ * foreign_ * stride_]),
        transfers_(window_) {
    for (int64_t k = 0; k < window_; ++k) post(k);
  }

  // The chunk's sum, once all have brought it.
  void sum(int64_t k) {
    wait_for(transfers_[k % window_]);
    std::vector<const void*> parts;
    size_t own = 0, foreign = 0;
    for (const int owner : direct_.owners_) {
      parts.push_back(owner == link_.rank() ? call_.parts[own++][link_.rank()] + k * chunk_
                                            : place(k, foreign++));
    }
    direct_.tree_.sum(call_.reduction, parts.data(), {call_.sum + k * chunk_},
                      bytes(k) / size_of(call_.reduction.element));
    if ((k + window_) * chunk_ < slice_) post(k + window_);
  }

  int64_t bytes(int64_t k) const { return std::min(chunk_, slice_ - k * chunk_); }

 private:
  char* place(int64_t k, size_t foreign) const {
    return scratch_.get() + (k % window_ * foreign_ + foreign) * stride_;
  }

  void post(int64_t k) {
    size_t foreign = 0;
    for (const int owner : direct_.owners_) {
      if (owner == link_.rank()) continue;
      transfers_[k % window_].push_back(
          link_.recv(owner, call_.slice_tag, place(k, foreign++), bytes(k)));
    }
  }

  const Direct& direct_;
  Link& link_;
  const DirectCall& call_;
  const int64_t chunk_;
  const int64_t slice_;
  const int64_t window_;
  const int64_t stride_;
  const size_t foreign_;
  const std::unique_ptr<char[]> scratch_;
  std::vector<Transfers> transfers_;
};

Direct::Direct(const std::vector<std::vector<Range>>& nodes, int ranks)
    : Direct(sorted(nodes), ranks) {}

Direct::Direct(std::vector<std::pair<Range, int>> owned, int ranks)
    : tree_(nodes_of(owned), ranks) {
  for (const auto& [node, owner] : owned) owners_.push_back(owner);
}

Direct Direct::of_ranks(int ranks) {
  std::vector<std::vector<Range>> nodes;
  for (int r = 0; r < ranks; ++r) nodes.push_back({{r, r + 1}});
  return Direct(nodes, ranks);
}

int64_t Direct::chunk_bytes(const std::vector<int64_t>& slices) {
  const int64_t most = *std::max_element(slices.begin(), slices.end());
  const int64_t lines = (most / 8 + 63) / 64 * 64;
  return std::clamp(lines, kLeastChunk, kMostChunk);
}

void Direct::run(Link& link, const DirectCall& call) const {
  const int rank = link.rank(), size = link.size();
  const int64_t chunk = chunk_bytes(call.bytes);
  const int64_t most = *std::max_element(call.bytes.begin(), call.bytes.end());
  Transfers sums, sent;
  // A sum may come into memory that is still being sent: it comes after all that was sent.
  for (int s = 0; s < static_cast<int>(call.results.size()); ++s) {
    if (s == rank || call.results[s] == nullptr) continue;
    for (int64_t at = 0; at < call.bytes[s]; at += chunk) {
      sums.push_back(
          link.recv(s, call.sum_tag, call.results[s] + at, std::min(chunk, call.bytes[s] - at)));
    }
  }
  Incoming incoming(*this, link, call, chunk);
  for (int64_t at = 0; at < most; at += chunk) {
    for (int i = 1; i < size; ++i) {
      const int s = (rank + i) % size;
      if (at >= call.bytes[s]) continue;
      for (const auto& part : call.parts) {
        sent.push_back(
            link.send(s, call.slice_tag, part[s] + at, std::min(chunk, call.bytes[s] - at)));
      }
    }
  }
  for (int64_t k = 0; k * chunk < call.bytes[rank]; ++k) {
    incoming.sum(k);
    for (const int taker : call.takers) {
      sent.push_back(link.send(taker, call.sum_tag, call.sum + k * chunk, incoming.bytes(k)));
    }
  }
  wait_for(sums);
  wait_for(sent);
}

}  // namespace lockstep::comm
