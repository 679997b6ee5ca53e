// Forms a group without a launcher, by means of any key-value store that its ranks share.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/comm/world.h"

namespace c10d {
class Store;
}

namespace lockstep::comm {

// This process's place in the group.
struct Membership {
  int rank = 0;
  int size = 1;
  // The numbers in their job (RANK) of the group's ranks, the same list on all of them: by these
  // errors name ranks, and say how one has ended. Empty: errors name ranks of the group.
  std::vector<int> world_ranks = {};
};

// How a rank joins; the same on all ranks, except for the timeout.
struct GroupOptions {
  // LOCKSTEP_BACKEND overrides it. Throws ConfigError for Nccl and CudaIpc: such a group is for
  // tensors on the CPU.
  Backend backend = Backend::Auto;
  // How long this rank waits for the others, to begin with and in each wait later.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // As in WorldOptions. LOCKSTEP_TLS overrides it.
  bool tls = false;
  // A secret that only the group's ranks know, at least 16 bytes: for TLS, and for the store that
  // rank 0 serves at an address. Empty: the job's secret, where it has one. A group of ranks of
  // several jobs needs a secret of its own.
  std::string secret = {};
};

// A group of all processes that call it with the same store, for tensors on the CPU, over the
// transport that World::from_env() would take. `store` is any of libtorch's, under keys that no
// other group uses (a c10d::PrefixStore); a few short values are written to it and removed, so that
// the same ranks may form another group by it afterwards, and it is not used once the call has
// returned. Where ranks are on several hosts, rank 0 is reached at the address of
// the first interface in GLOO_SOCKET_IFNAME, else at the one from which it talks to MASTER_ADDR,
// else at that of its host's name. Unlike World::from_env() it leaves the process's threads and
// memory as they are. Blocks until all have come. Throws CommError that names the ranks which have
// not come within the deadline, and ConfigError for an impossible rank or size and ranks that
// disagree. The process ignores SIGPIPE from then on, unless it has a handler,
// and its soft limit of open descriptors becomes the hard one, 524,288 at most.
Group join_group(const c10::intrusive_ptr<c10d::Store>& store, const Membership& me,
                 const GroupOptions& options = {});

// The same by an address, "10.0.0.1:29500", at which rank 0 serves the store itself. A process may
// join several groups at one address, one after the other: each rank's n-th call meets the n-th
// calls of the others. Rank 0 serves the store until its process exits; the exit waits, five
// seconds at most, for ranks that are still forming a group through it. Where there is a secret,
// the job's or that of `options`, the store serves only ranks that know it, and a later call with
// another secret at the same address throws ConfigError.
Group join_group(const std::string& address, const Membership& me,
                 const GroupOptions& options = {});

}  // namespace lockstep::comm

namespace lockstep {
using comm::GroupOptions;
using comm::join_group;
using comm::Membership;
}  // namespace lockstep
