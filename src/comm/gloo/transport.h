// CPU ranks of several hosts, over TCP: libtorch's own c10d::ProcessGroupGloo.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "comm/store/store.h"
#include "comm/transport.h"

namespace lockstep::comm {

// The kind of the group's other ranks.
enum class GlooPeers {
  Lockstep,  // ranks of this library: calls carry a signature, so that different ones are never
             // matched
  Python,    // torch.distributed ranks too: exactly its calls on the wire, nothing is checked
};

struct GlooOptions {
  // The deadline of the start and of every wait.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  GlooPeers peers = GlooPeers::Lockstep;
  // The world's numbers of the group's ranks; empty: the same numbers.
  std::vector<int> members = {};
  // For a group that adds up sums of hosts: of the tree over `ranks` ranks, member m contributes
  // nodes[m]. An all_reduce then takes them as its inputs, one tensor a node, and puts the result
  // into its output, which may be one of them; a reduce_scatter takes node after node, size()
  // tensors each. Empty: every member is one rank.
  std::vector<std::vector<Range>> nodes = {};
  int ranks = 0;
};

// The keys that torch.distributed.init_process_group("gloo") uses in the store: the store that a
// world with Python ranks gives to make_gloo_transport.
Store python_group_keys(const Store& store);

// Every rank calls it with a store under the same prefix; blocks until all have connected. Throws
// CommError that names who is missing. docs/transports.md says how Gloo differs from shm.
std::shared_ptr<Transport> make_gloo_transport(const Store& store, int rank, int size,
                                               const GlooOptions& options = {});

}  // namespace lockstep::comm
