// Tasks of Slurm's srun.

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "core/place/node_list.h"
#include "core/place/sources.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/log.h"

namespace lockstep {
namespace {

constexpr const char* kRank = "SLURM_PROCID";

// Whether "0,2,3" names the rank.
bool has_rank(const std::string& list, int rank) {
  return ("," + list + ",").find(fmt::format(",{},", rank)) != std::string::npos;
}

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
  const std::string here = env_text("SLURM_GTIDS").value_or("");
  if (node == 0 && has_rank(here, rank) && !has_rank(here, 0)) {
    contradiction(
        "rank 0 does not run on {}, the first node of the step, where the others look for it "
        "(SLURM_GTIDS={}): set MASTER_ADDR to the name of its node for all "
        "(srun --export=ALL,MASTER_ADDR=...)",
        first, here);
  }
  return first;
}

}  // namespace

std::optional<std::string> slurm_step() {
  constexpr unsigned long kLastOfSrun = 0xfffffff0;  // Slurm's SLURM_MAX_NORMAL_STEP_ID
  auto step = env_text("SLURM_STEP_ID");
  if (step && std::strtoul(step->c_str(), nullptr, 10) > kLastOfSrun) step.reset();
  return step;
}

int slurm_node() {
  const int number = required("SLURM_NODEID", kRank, 0, kMostRanks);
  const auto list = env_text("SLURM_STEP_NODELIST"), own = env_text("SLURMD_NODENAME");
  if (!list || !own) return number;
  const auto names = expand_node_list(*list);
  const auto at = std::find(names.begin(), names.end(), *own);
  return at == names.end() ? number : static_cast<int>(at - names.begin());
}

std::optional<Place> place_from_slurm() {
  const auto step = slurm_step();
  if (!step || !env_text(kRank)) {
    const auto job = env_text("SLURM_JOB_ID"), tasks = env_text("SLURM_NTASKS");
    const auto count = tasks ? tasks : env_text("SLURM_JOB_NUM_NODES");
    if (job && count && *count != "1") {
      log::warn(fmt::format(
          "this is a shell of Slurm job {}, not one of its {} {}: running as a single process; "
          "start the program with srun",
          *job, *count, tasks ? "tasks" : "nodes' tasks"));
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
  const int node = slurm_node();
  int nodes = 1;
  if (const auto counts = env_text("SLURM_STEP_TASKS_PER_NODE")) {
    const auto tasks = expand_task_counts(*counts);
    nodes = static_cast<int>(tasks.size());
    if (node >= nodes) {
      contradiction("SLURM_NODEID={} with SLURM_STEP_TASKS_PER_NODE={}: nodes count from 0", node,
                    *counts);
    }
    const int64_t sum = std::accumulate(tasks.begin(), tasks.end(), int64_t{0});
    if (sum != place.size && env_text("SLURM_STEP_NUM_TASKS")) {
      contradiction("SLURM_STEP_NUM_TASKS={} with SLURM_STEP_TASKS_PER_NODE={}, which are {}",
                    place.size, *counts, sum);
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
