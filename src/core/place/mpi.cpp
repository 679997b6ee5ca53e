// Ranks that an mpirun has started. They need not be MPI programs.
#include <unistd.h>

#include <string>

#include "core/place/sources.h"
#include "core/process/stat.h"
#include "lockstep/core/environment.h"

namespace lockstep {
namespace {

// MPICH gives its ranks no id of the job. Those of one host have the same ancestor: the process
// that started them, also when a wrapper script is between.
std::string hydra_proxy() {
  pid_t pid = getppid();
  for (pid_t at = pid; at > 1;) {
    const auto stat = process_stat(at);
    if (!stat) break;
    if (stat->name.starts_with("hydra_pmi")) return std::to_string(at);
    at = stat->parent;
  }
  return std::to_string(pid);
}

Place checked(Place place) {
  if (place.rank >= place.size) {
    contradiction("{} says rank {} of {}: ranks count from 0", place.source, place.rank,
                  place.size);
  }
  return place;
}

// One process alone needs none of these.
int local(const char* name, int alone, int size, const char* because, int low) {
  if (size == 1 && !env_text(name)) return alone;
  return required(name, because, low, kMostRanks);
}

Place from_open_mpi() {
  constexpr const char* kRank = "OMPI_COMM_WORLD_RANK";
  // The id of the mpirun process and of the job within it.
  const std::string id =
      env_text("PMIX_NAMESPACE")
          .value_or(env_text("OMPI_MCA_orte_hnp_uri").value_or("").substr(0, 24));
  const int size = required("OMPI_COMM_WORLD_SIZE", kRank, 1, kMostRanks);
  return checked({.rank = required(kRank, "OMPI_COMM_WORLD_SIZE", 0, kMostRanks),
                  .size = size,
                  .local_rank = local("OMPI_COMM_WORLD_LOCAL_RANK", 0, size, kRank, 0),
                  .local_size = local("OMPI_COMM_WORLD_LOCAL_SIZE", 1, size, kRank, 1),
                  .port = id.empty() ? 0 : port_of(id),
                  .source = "Open MPI",
                  .job = "mpi-" + id});
}

Place from_mpich() {
  const std::string id = hydra_proxy();
  return checked({.rank = required("PMI_RANK", "MPI_LOCALNRANKS", 0, kMostRanks),
                  .size = required("PMI_SIZE", "PMI_RANK", 1, kMostRanks),
                  .local_rank = required("MPI_LOCALRANKID", "PMI_RANK", 0, kMostRanks),
                  .local_size = required("MPI_LOCALNRANKS", "PMI_RANK", 1, kMostRanks),
                  .port = port_of("hydra-" + id),
                  .source = "MPICH",
                  .job = "mpi-" + id});
}

Place from_mvapich() {
  constexpr const char* kRank = "MV2_COMM_WORLD_RANK";
  const std::string id = std::to_string(getppid());
  const int size = required("MV2_COMM_WORLD_SIZE", kRank, 1, kMostRanks);
  return checked({.rank = required(kRank, "MV2_COMM_WORLD_SIZE", 0, kMostRanks),
                  .size = size,
                  .local_rank = local("MV2_COMM_WORLD_LOCAL_RANK", 0, size, kRank, 0),
                  .local_size = local("MV2_COMM_WORLD_LOCAL_SIZE", 1, size, kRank, 1),
                  .port = port_of("mvapich-" + id),
                  .source = "MVAPICH",
                  .job = "mpi-" + id});
}

}  // namespace

std::optional<Place> place_from_mpi() {
  std::optional<Place> place;
  if (env_text("OMPI_COMM_WORLD_RANK")) {
    place = from_open_mpi();
  } else if (env_text("MV2_COMM_WORLD_RANK")) {
    place = from_mvapich();
  } else if (env_text("PMI_RANK") && env_text("MPI_LOCALNRANKS")) {
    // Without the second it is srun --mpi=pmi2, where Slurm's variables say more.
    place = from_mpich();
  }
  // The ids of MPICH and MVAPICH are those of one host.
  if (place && place->local_size < place->size && place->source != "Open MPI") {
    place->port = 0;
    place->job = "mpi";
  }
  return place;
}

}  // namespace lockstep
