// Launchers that Slurm's srun has started, one on each node.
#include <fmt/format.h>

#include <algorithm>

#include "core/place/node_list.h"
#include "core/place/secret.h"
#include "core/place/sources.h"
#include "core/security/munge.h"
#include "launch/rendezvous/host.h"
#include "launch/rendezvous/rendezvous.h"
#include "lockstep/core/environment.h"

namespace lockstep::launch {
namespace {

// Whether an inner launcher has started this one, whose variables then count.
bool is_somebody_elses() {
  for (const char* name :
       {"RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "MPI_LOCALNRANKS"}) {
    if (env_text(name)) return true;
  }
  return false;
}

// Launchers without a token need it.
void check_munge(int tasks) {
  const std::string fault = munge::fault();
  if (fault.empty()) return;
  const std::string passed_on = env_text("SLURM_EXPORT_ENV").value_or("ALL");
  throw ConfigError(fmt::format(
      "[run] srun has started {} launchers, which prove to each other that they belong together by "
      "a secret of the job: write export LOCKSTEP_TOKEN=$(openssl rand -hex 32) before srun{} "
      "(with "
      "MUNGE on this host they would do without: {})",
      tasks,
      passed_on.starts_with("ALL") ? ""
                                   : fmt::format(", which passes it on with --export=ALL "
                                                 "(SLURM_EXPORT_ENV={} keeps it back)",
                                                 passed_on),
      fault));
}

}  // namespace

std::string remark_on_slurm() {
  const auto nodes = env_text("SLURM_JOB_NUM_NODES");
  if (!nodes || *nodes == "1" || slurm_step() || is_somebody_elses()) return "";
  return fmt::format(
      "this is a shell of Slurm job {}, which has {} nodes: all ranks start on this one; write "
      "srun --ntasks-per-node=1 lockstep run ... (--standalone: as meant)",
      env_text("SLURM_JOB_ID").value_or("?"), *nodes);
}

std::string remark_on_cores(std::string_view asked, int ranks) {
  const auto given = env_int("SLURM_CPUS_ON_NODE", 1, kMostRanks);
  if (asked != "auto" && asked != "cpu") return "";
  if (!given || !slurm_step() || is_somebody_elses()) return "";
  if (ranks != cores() || ranks >= *given) return "";
  return fmt::format(
      "this task may use {} of the {} cores of its Slurm job on this node, and --nproc-per-node {} "
      "starts a rank for each: write srun --cpus-per-task={}",
      ranks, *given, asked, *given);
}

std::optional<Rendezvous> Rendezvous::from_slurm() {
  constexpr const char* kRank = "SLURM_PROCID";
  const auto step = slurm_step();
  if (!step || !env_text(kRank) || is_somebody_elses()) return std::nullopt;
  const int tasks = required("SLURM_STEP_NUM_TASKS", kRank, 1, kMostRanks);
  if (tasks == 1) return std::nullopt;
  const auto list = env_text("SLURM_STEP_NODELIST"), counts = env_text("SLURM_STEP_TASKS_PER_NODE");
  if (!list || !counts) {
    throw ConfigError(fmt::format("[run] SLURM_STEP_ID is set, but {} is not",
                                  list ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_STEP_NODELIST"));
  }
  const auto each = expand_task_counts(*counts);
  if (std::any_of(each.begin(), each.end(), [](int count) { return count != 1; })) {
    throw ConfigError(fmt::format(
        "[run] srun has started {} launchers on {} node{} ({}={}), where one on each starts all "
        "ranks of its node: write srun --ntasks-per-node=1 lockstep run --nproc-per-node N "
        "PROGRAM; "
        "or srun PROGRAM, a task for each rank and no launcher",
        tasks, each.size(), each.size() == 1 ? "" : "s", "SLURM_STEP_TASKS_PER_NODE", *counts));
  }
  const std::string id = fmt::format("slurm-{}.{}", env_text("SLURM_JOB_ID").value_or("0"), *step);
  const int port = port_of(id + "/launchers");
  Rendezvous rendezvous;
  if (!has_token()) {
    check_munge(tasks);
    rendezvous.secret_port = secret_port_of(id, port);
  }
  rendezvous.min_nodes = rendezvous.max_nodes = tasks;
  rendezvous.node_rank = slurm_node();
  if (*rendezvous.node_rank >= tasks) {
    contradiction("SLURM_STEP_NODELIST={} with SLURM_STEP_NUM_TASKS={}: a task on each node", *list,
                  tasks);
  }
  rendezvous.endpoint = fmt::format("{}:{}", expand_node_list(*list).front(), port);
  rendezvous.run_id = id;
  return rendezvous;
}

}  // namespace lockstep::launch
