#include "comm/cuda_ipc/transport.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/cuda_ipc/communicator.h"
#include "comm/cuda_ipc/ops.h"
#include "comm/shm/door.h"
#include "comm/shm/segment.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// What each rank tells the others of each step.
struct Report {
  Cookie cookie;  // what its memory's descriptor comes with
  int pid;
  cuda_ipc::Uuid device;
  bool takes_turns;
  SegmentHandle arrivals;  // rank 0's
  char problem[1000];
};

// Runs one step on all ranks, and throws on all when one could not do it.
template <class Step>
std::vector<Report> on_all(const std::shared_ptr<Transport>& cpu, const Step& step) {
  Report mine{};
  mine.pid = getpid();
  try {
    step(mine);
  } catch (const Error& error) {
    std::strncpy(mine.problem, error.what(), sizeof mine.problem - 1);
  }
  const auto texts = Group(cpu).all_gather_bytes(
      {reinterpret_cast<const char*>(&mine), sizeof mine}, {.label = "cuda_ipc"});
  std::vector<Report> reports(texts.size());
  for (size_t r = 0; r < texts.size(); ++r) {
    std::memcpy(&reports[r], texts[r].data(), std::min(texts[r].size(), sizeof(Report)));
    if (reports[r].problem[0] == '\0') continue;
    const std::string said = reports[r].problem;
    throw ConfigError(
        fmt::format("{}{} (rank {})", said.starts_with('[') ? "" : "[cuda_ipc] ", said, r));
  }
  return reports;
}

// Whether two ranks are on one device, on which they take turns.
bool take_turns(const std::vector<Report>& reports) {
  for (const Report& report : reports) {
    if (!report.takes_turns) return false;
  }
  for (size_t a = 0; a < reports.size(); ++a) {
    for (size_t b = a + 1; b < reports.size(); ++b) {
      if (reports[a].device == reports[b].device) return true;
    }
  }
  return false;
}

}  // namespace

std::shared_ptr<Transport> make_cuda_ipc_transport(const Store& store,
                                                   std::shared_ptr<Transport> cpu,
                                                   const DeviceOptions& options) {
  const int rank = cpu->rank(), size = cpu->size();
  std::shared_ptr<cuda_ipc::Communicator> comm;
  Segment arrivals;
  const auto devices = on_all(cpu, [&](Report& mine) {
    comm = std::make_shared<cuda_ipc::Communicator>(options.device.index(), rank, size);
    mine.device = comm->uuid();
    mine.takes_turns = comm->takes_turns();
  });
  const bool turns = take_turns(devices);
  const auto reports = on_all(cpu, [&](Report& mine) {
    mine.cookie = new_cookie();
    const Fd descriptor = comm->allocate(turns ? cuda_ipc::kTurnBytes : cuda_ipc::kStageBytes);
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      const auto problem =
          Door::hand_over(options.layout.doors[peer], mine.cookie, descriptor.get());
      if (problem)
        throw CommError(
            fmt::format("device memory cannot be handed to rank {}: {}", peer, *problem));
    }
    if (!turns || rank != 0) return;
    const auto& doors = options.layout.doors;
    arrivals = Segment::create(comm->arrivals_bytes(size), {doors.begin() + 1, doors.end()});
    arrivals.populate(0, arrivals.size());
    mine.arrivals = arrivals.handle();
  });
  on_all(cpu, [&](Report&) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      const std::optional<Fd> descriptor = Door::own().take(reports[peer].cookie);
      if (!descriptor)
        throw CommError(fmt::format("the device memory of rank {} has not come", peer));
      comm->add(peer, *descriptor);
    }
    if (!turns) return;
    comm->wait_on_streams(rank == 0 ? std::move(arrivals) : Segment::attach(reports[0].arrivals));
  });
  DeviceParts parts{.cpu = std::move(cpu),
                    .comm = comm,
                    .ops = std::make_unique<CudaIpcOps>(comm),
                    .again = &make_cuda_ipc_transport};
  for (const Report& report : devices) parts.pids.push_back(report.pid);
  return make_device_transport(store, std::move(parts), options);
}

}  // namespace lockstep::comm
