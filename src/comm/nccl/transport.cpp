#include "comm/nccl/transport.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/nccl/communicator.h"
#include "comm/nccl/ops.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// What each rank brings to the start.
struct DeviceOffer {
  nccl::UniqueId id;
  int version;
  int pid;
  char problem[500];
};

DeviceOffer make_offer(bool is_first) {
  DeviceOffer offer{};
  offer.pid = getpid();
  try {
    const nccl::Api& api = nccl::load();
    offer.version = api.version;
    if (is_first && api.GetUniqueId(&offer.id) != nccl::Success) {
      throw ConfigError(
          fmt::format("[nccl] {} makes no unique id: {}", api.path, api.GetLastError(nullptr)));
    }
  } catch (const ConfigError& error) {
    std::strncpy(offer.problem, error.what(), sizeof offer.problem - 1);
  }
  return offer;
}

std::vector<DeviceOffer> exchange_offers(const std::shared_ptr<Transport>& cpu) {
  const DeviceOffer mine = make_offer(cpu->rank() == 0);
  const auto texts = Group(cpu).all_gather_bytes(
      {reinterpret_cast<const char*>(&mine), sizeof mine}, {.label = "nccl"});
  std::vector<DeviceOffer> offers(texts.size());
  for (size_t r = 0; r < texts.size(); ++r) {
    std::memcpy(&offers[r], texts[r].data(), std::min(texts[r].size(), sizeof(DeviceOffer)));
    if (offers[r].problem[0] != '\0')
      throw ConfigError(fmt::format("{} (rank {})", offers[r].problem, r));
  }
  for (size_t r = 1; r < texts.size(); ++r) {
    if (offers[r].version == offers[0].version) continue;
    throw ConfigError(fmt::format(
        "[nccl] rank 0 has NCCL {}, rank {} has {}: all ranks need the same",
        nccl::version_text(offers[0].version), r, nccl::version_text(offers[r].version)));
  }
  return offers;
}

}  // namespace

std::shared_ptr<Transport> make_nccl_transport(const Store& store, std::shared_ptr<Transport> cpu,
                                               const DeviceOptions& options) {
  const int rank = cpu->rank(), size = cpu->size();
  const std::vector<DeviceOffer> offers = exchange_offers(cpu);
  auto comm = std::make_shared<NcclComm>(nccl::load(), NcclComm::Setup{offers[0].id, rank, size});
  DeviceParts parts{.cpu = std::move(cpu),
                    .comm = comm,
                    .ops = std::make_unique<NcclOps>(comm),
                    .again = &make_nccl_transport};
  for (int r = 0; r < size; ++r) {
    const bool is_near = options.layout.hosts[r] == options.layout.hosts[rank];
    parts.pids.push_back(is_near ? offers[r].pid : 0);
  }
  return make_device_transport(store, std::move(parts), options);
}

}  // namespace lockstep::comm
