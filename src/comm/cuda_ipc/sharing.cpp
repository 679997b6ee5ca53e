#include "comm/cuda_ipc/sharing.h"

#include <fmt/format.h>

#include <optional>

#include "comm/shm/door.h"
#include "lockstep/comm/group.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::cuda_ipc {

std::vector<std::string> Sharing::exchange(std::string_view mine) const {
  return Group(cpu_).all_gather_bytes(mine, {.label = "cuda_ipc"});
}

void Sharing::refuse(const std::string& problem, size_t rank) {
  throw ConfigError(
      fmt::format("{}{} (rank {})", problem.starts_with('[') ? "" : "[cuda_ipc] ", problem, rank));
}

std::vector<DeviceMemory> Sharing::memory_of_all(Communicator& comm, U64 bytes) const {
  const int rank = cpu_->rank(), size = cpu_->size();
  std::vector<DeviceMemory> memory(size);
  // What one lacks is known before any descriptor goes over, which would keep its memory.
  on_all([&] { memory[rank] = comm.allocate(bytes); });
  // What each rank's descriptor comes with.
  const auto cookies = on_all<Cookie>([&](Cookie& cookie) {
    cookie = new_cookie();
    const Fd descriptor = memory[rank].descriptor();
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      if (const auto problem = Door::hand_over(doors_[peer], cookie, descriptor.get()))
        throw CommError(
            fmt::format("device memory cannot be handed to rank {}: {}", peer, *problem));
    }
  });
  on_all([&] {
    std::vector<std::optional<Fd>> descriptors(size);
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) descriptors[peer] = Door::own().take(cookies[peer]);
    }
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      if (!descriptors[peer])
        throw CommError(fmt::format("the device memory of rank {} has not come", peer));
      memory[peer] = comm.open(*descriptors[peer], bytes);
    }
  });
  return memory;
}

}  // namespace lockstep::comm::cuda_ipc
