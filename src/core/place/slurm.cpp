// Tasks of Slurm's srun.
#include <cstdlib>

#include "core/place/node_list.h"
#include "core/place/sources.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/log.h"

namespace lockstep {
namespace {

constexpr const char* kRank = "SLURM_PROCID";

// The first of the step's nodes, where rank 0 is unless the tasks were distributed otherwise.
std::string first_node(int rank, int node) {
  const auto list = env_text("SLURM_STEP_NODELIST");
  if (!list) contradiction("SLURM_STEP_ID is set, but SLURM_STEP_NODELIST is not");
  const std::string first = expand_node_list(*list).front();
  if (rank == 0 && node != 0) {
    contradiction(
        "rank 0 runs on {}, not on {}, the first node of the step, where the others look for it: "
        "set MASTER_ADDR={} for all (srun --export=ALL,MASTER_ADDR=...)",
        env_text("SLURMD_NODENAME").value_or("another node"), first,
        env_text("SLURMD_NODENAME").value_or("its name"));
  }
  return first;
}

}  // namespace

std::optional<Place> place_from_slurm() {
  const auto step = env_text("SLURM_STEP_ID");
  if (!step || !env_text(kRank)) {
    const auto tasks = env_text("SLURM_NTASKS");
    if (env_text("SLURM_JOB_ID") && tasks && *tasks != "1") {
      log::warn(fmt::format(
          "this is a shell of Slurm job {}, not one of its {} tasks: running as a single process; "
          "start the program with srun",
          *env_text("SLURM_JOB_ID"), *tasks));
    }
    return std::nullopt;
  }
  const char* const size_name =
      env_text("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  Place place{.rank = required(kRank, "SLURM_STEP_ID", 0, kMostRanks),
              .size = required(size_name, kRank, 1, kMostRanks),
              .local_rank = required("SLURM_LOCALID", kRank, 0, kMostRanks),
              .source = "Slurm"};
  if (place.rank >= place.size) {
    contradiction("{}={} with {}={}: ranks count from 0", kRank, place.rank, size_name, place.size);
  }
  const int node = required("SLURM_NODEID", kRank, 0, kMostRanks);
  int nodes = 1;
  if (const auto counts = env_text("SLURM_STEP_TASKS_PER_NODE")) {
    const auto tasks = expand_task_counts(*counts);
    nodes = static_cast<int>(tasks.size());
    if (node >= nodes) {
      contradiction("SLURM_NODEID={} with SLURM_STEP_TASKS_PER_NODE={}: nodes count from 0", node,
                    *counts);
    }
    place.local_size = tasks[static_cast<size_t>(node)];
  }
  const std::string id = fmt::format("{}.{}", env_text("SLURM_JOB_ID").value_or("0"), *step);
  place.job = fmt::format("slurm-{}/{}", id, env_text("SLURM_RESTART_COUNT").value_or("0"));
  place.port = port_of("slurm-" + id);
  if (nodes > 1 && !env_text("MASTER_ADDR")) place.host = first_node(place.rank, node);
  return place;
}

}  // namespace lockstep
