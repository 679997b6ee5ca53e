// CPU ranks of several hosts, over TCP: libtorch's own c10d::ProcessGroupGloo.
#pragma once

#include <chrono>
#include <memory>

#include "comm/store.h"
#include "comm/transport.h"

namespace lockstep::comm {

// Who else is in the group.
enum class GlooPeers {
  Lockstep,  // ranks of this library: calls carry a signature, so that different ones never meet
  Python,    // torch.distributed ranks too: exactly its calls on the wire, nothing is checked
};

struct GlooOptions {
  // The deadline of the start and of every wait.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  GlooPeers peers = GlooPeers::Lockstep;
};

// The keys under which torch.distributed.init_process_group("gloo") meets: the store that a world
// with Python ranks gives to make_gloo_transport.
Store python_group_keys(const Store& store);

// Every rank calls it with a store under the same prefix; blocks until all have connected. Throws
// CommError that names who is missing. docs/transports.md says how Gloo differs from shm.
std::shared_ptr<Transport> make_gloo_transport(const Store& store, int rank, int size,
                                               const GlooOptions& options = {});

}  // namespace lockstep::comm
