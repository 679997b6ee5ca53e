// Each collective as messages over TCP.
#pragma once

#include <functional>
#include <memory>

#include "comm/direct/exchange.h"
#include "comm/net/net.h"
#include "comm/transport.h"

namespace lockstep::comm {

// What one request does.
struct TcpCall {
  // What it begins with; empty where nothing is to be moved.
  std::function<void(const NetPort&)> begin = {};
  // Writes the results to the request's tensors, once the call is over. Holds the memory until
  // then.
  std::function<void()> finish = [] {};
};

// Of a group of `size` members over `ranks` ranks.
TcpCall tcp_call(const Request& request, int rank, int size, int ranks,
                 const std::shared_ptr<const Direct>& direct);
// Whether each rank has sizes of its own, which may not fit together.
bool has_own_sizes(const Request& request, int size);

}  // namespace lockstep::comm
