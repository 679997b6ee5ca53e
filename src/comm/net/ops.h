// The collectives over TCP, on plain memory: each begins a call and goes on by itself. No torch.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/direct/exchange.h"
#include "comm/net/net.h"

namespace lockstep::comm::net {

struct Span {
  char* data = nullptr;
  int64_t bytes = 0;
};

// Instead of a message that is not sent, on either side.
constexpr Span kNothing{nullptr, -1};

// From every rank in[r], to every rank out[r]; the own one is copied. Lists of size().
void exchange(const NetPort& port, const std::vector<Span>& in, const std::vector<Span>& out);

// Short data down a binomial tree; of long data each other rank gets a slice, and passes it on to
// the others while more of it comes.
void broadcast(const NetPort& port, int root, Span data);

// log2(n) rounds, each with one message from and to each rank (Hensgen, Finkel and Manber, 1988).
void barrier(const NetPort& port);

// As Direct::run.
void reduce(const NetPort& port, const std::shared_ptr<const Direct>& direct, DirectCall call);

}  // namespace lockstep::comm::net
