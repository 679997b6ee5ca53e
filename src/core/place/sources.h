// The launchers whose variables place_from_env() knows.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/place.h"

namespace lockstep {

constexpr int kMostRanks = 1 << 20;

// Place::host of ranks that are all on one host, and Place::source of those whose launcher has set
// RANK and WORLD_SIZE.
constexpr const char* kLoopback = "127.0.0.1";
constexpr const char* kPlainLauncher = "the launcher's variables";

// Each gives nothing when its launcher's variables are not there. MASTER_ADDR and MASTER_PORT are
// read by the caller; `host` and `port` are what follows from the launcher's own variables.
std::optional<Place> place_from_mpi();
std::optional<Place> place_from_slurm();

// The id of the srun step whose task this process is. The shells of sbatch and of salloc are steps
// for Slurm, too, but no tasks that it has started for a job: nothing.
std::optional<std::string> slurm_step();
// This node's place in the step's lists. Those are sorted by name where SLURM_NODEID is not: in
// jobs of several parts (srun PROGRAM : PROGRAM).
int slurm_node();

// Whether ranks of several hosts can find rank 0 without being given its address: under Open MPI's
// and MPICH's mpirun.
bool can_meet_over_mpirun(const Place& place);
// Every rank calls it, once; blocks until all have. Fills in host, port and, on rank 0, listen_fd.
void meet_over_mpirun(Place& place);

// Port 20000 to 29999, below those that the kernel hands out by itself, the same for equal ids.
int port_of(std::string_view job_id);
// Likewise, where the job's secret is handed out; not `taken`, another port of the job.
uint16_t secret_port_of(const std::string& job_id, int taken);

// The number of a variable that its launcher always sets together with `because`.
int required(const char* name, const char* because, int low, int high);

// Throws ConfigError: options or variables that do not go together.
template <class... Args>
[[noreturn]] void contradiction(fmt::format_string<Args...> text, Args&&... args) {
  throw ConfigError("[environment] " + fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace lockstep
