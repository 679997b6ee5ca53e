// CPU ranks of one host, over memory they share.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/host/processes.h"
#include "comm/shm/group_memory.h"
#include "comm/store/store.h"
#include "comm/transport.h"

namespace lockstep::comm {

struct ShmOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // The world's number of rank r.
  std::vector<int> members = {};
  // Where rank r is handed memory (see door.h).
  std::vector<std::string> doors = {};
  // The number of rank r in error messages; empty: r.
  std::vector<int> called = {};
  // Where group memory is found; one for several transports over the same ranks, all of whose
  // memory the first one gives.
  std::shared_ptr<GroupMemoryIndex> index = nullptr;
  // By rank, of those that are known before they arrive.
  WatchedProcesses processes = {};
  // The store's.
  std::shared_ptr<const LauncherStatus> launcher_status = nullptr;
};

// Every rank of the host calls it. `store` is read and written under keys of its own. Throws
// CommError on all ranks when the memory cannot be had.
std::shared_ptr<Transport> make_shm_transport(const Store& store, int rank, int size,
                                              ShmOptions options);

}  // namespace lockstep::comm
