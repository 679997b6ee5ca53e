#include "comm/cuda_ipc/transport.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "comm/cuda_ipc/communicator.h"
#include "comm/cuda_ipc/ops.h"
#include "comm/cuda_ipc/sharing.h"
#include "comm/shm/segment.h"

namespace lockstep::comm {
namespace {

// What each rank tells the others of itself.
struct Report {
  int pid;
  cuda_ipc::Uuid device;
  int multiprocessors;
  bool takes_turns;
};

int ranks_on(const std::vector<Report>& reports, const cuda_ipc::Uuid& device) {
  return static_cast<int>(std::count_if(reports.begin(), reports.end(),
                                        [&](const Report& each) { return each.device == device; }));
}

// Whether two ranks are on one device, on which they take turns.
bool take_turns(const std::vector<Report>& reports) {
  return std::all_of(reports.begin(), reports.end(),
                     [](const Report& r) { return r.takes_turns; }) &&
         std::any_of(reports.begin(), reports.end(),
                     [&](const Report& r) { return ranks_on(reports, r.device) > 1; });
}

int most_on_one(const std::vector<Report>& reports) {
  int most = 0;
  for (const Report& report : reports) most = std::max(most, ranks_on(reports, report.device));
  return most;
}

// Blocks that wait for others keep their place: those of all ranks on a device have to have one
// there, and where a rank has a device to itself, computing goes on beside them. A multiprocessor
// has room for two (kernels.cu). The world's group has half of that, and two more groups that are
// under way at the same time, whose ranks need not be the same, a quarter each.
int most_blocks(const std::vector<Report>& reports, int ranks_on_one, bool is_world) {
  constexpr int kBesideComputing = 32;
  int most = cuda_ipc::kMaxBlocks;
  for (const Report& report : reports) {
    const int half = report.multiprocessors / 2;
    most = std::min(most, ranks_on_one == 1
                              ? std::min(kBesideComputing, half)
                              : (is_world ? report.multiprocessors : half) / ranks_on_one);
  }
  return std::max(most, 1);
}

}  // namespace

std::shared_ptr<Transport> make_cuda_ipc_transport(const Store& store,
                                                   std::shared_ptr<Transport> cpu,
                                                   const DeviceOptions& options) {
  const int rank = cpu->rank(), size = cpu->size();
  const auto& doors = options.layout.doors;
  const cuda_ipc::Sharing sharing(cpu, doors);
  std::shared_ptr<cuda_ipc::Communicator> comm;
  const auto reports = sharing.on_all<Report>([&](Report& mine) {
    comm = std::make_shared<cuda_ipc::Communicator>(options.device.index(), rank, size);
    mine = {getpid(), comm->uuid(), comm->multiprocessors(), comm->takes_turns()};
  });
  const bool turns = take_turns(reports);
  const cuda_ipc::U64 stage_bytes = turns ? cuda_ipc::kTurnBytes : cuda_ipc::kStageBytes;
  comm->begin(sharing.memory_of_all(*comm, cuda_ipc::memory_bytes(size, stage_bytes)), stage_bytes);
  if (turns) {
    Segment arrivals;
    const auto handles = sharing.on_all<SegmentHandle>([&](SegmentHandle& of_first) {
      if (rank != 0) return;
      arrivals = Segment::create(comm->arrivals_bytes(size), {doors.begin() + 1, doors.end()});
      arrivals.populate(0, arrivals.size());
      of_first = arrivals.handle();
    });
    sharing.on_all([&] {
      comm->wait_on_streams(rank == 0 ? std::move(arrivals) : Segment::attach(handles[0]));
    });
  }
  DeviceOptions own = options;
  const bool is_world = options.ranks_on_one == 0;
  if (is_world) own.ranks_on_one = most_on_one(reports);
  const int most = turns ? cuda_ipc::kMaxBlocks : most_blocks(reports, own.ranks_on_one, is_world);
  DeviceParts parts{.cpu = std::move(cpu),
                    .comm = comm,
                    .ops = std::make_unique<CudaIpcOps>(comm, sharing, most),
                    .again = &make_cuda_ipc_transport};
  for (const Report& report : reports) parts.pids.push_back(report.pid);
  return make_device_transport(store, std::move(parts), own);
}

}  // namespace lockstep::comm
