// CPU ranks of one host, over memory they share.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "comm/store.h"
#include "comm/transport.h"

namespace lockstep::comm {

// Every rank of the host calls it. `store` is read and written under keys of its own; `local_ranks[r]` is what the launcher calls
// rank r on this host. Throws CommError on all ranks when the memory cannot be had.
std::shared_ptr<Transport> make_shm_transport(const Store& store, int rank, int size, std::chrono::milliseconds timeout,
                                              std::vector<int> local_ranks);

}  // namespace lockstep::comm
