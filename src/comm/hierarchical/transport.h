// CPU ranks of several hosts, several on a host: shared memory within a host, a network between
// hosts. Bytes that cross between hosts are as few as can be: each host's sum goes out once, cut
// among its ranks, which exchange their slices with the other hosts' at the same time.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/host/processes.h"
#include "comm/store/store.h"
#include "comm/transport.h"
#include "comm/world/topology.h"

namespace lockstep::comm {

// Makes the transport between hosts: `members` are the world's numbers of its ranks; nodes and
// ranks are as in TcpOptions.
struct NetMembers {
  int rank = 0;
  std::vector<int> members;
  std::vector<std::vector<Range>> nodes = {};
  int ranks = 0;
};
using MakeNet = std::function<std::shared_ptr<Transport>(const Store&, const NetMembers&)>;

// Bytes of a large all_reduce that go through the two levels together.
int64_t chunk_bytes(int columns, int hosts);

// Every rank calls it, with a store under the same prefix. The transport that suits the layout: shm
// for one host, the network's for ranks that are all on hosts of their own, else both. `watched`
// are processes of this host, by rank, whose end is to be noticed before they arrive, too; empty:
// none. Throws what they throw.
std::shared_ptr<Transport> make_transport(const Store& store, int rank, const Topology& layout,
                                          std::chrono::milliseconds timeout,
                                          const MakeNet& make_net,
                                          const WatchedProcesses& watched = {});

}  // namespace lockstep::comm
