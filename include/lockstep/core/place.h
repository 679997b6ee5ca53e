// This process's rank in its job, from the environment variables that its launcher has set.
#pragma once

#include <optional>
#include <string>

#include "lockstep/core/compiler.h"

namespace lockstep {

// A rank, the size of its job, and where rank 0's store is.
struct Place {
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank = std::nullopt;  // among the ranks of this host, where it is known
  std::optional<int> local_size = std::nullopt;
  // The address of rank 0's store; empty and 0 when size is 1.
  std::string host = {};
  int port = 0;
  // On rank 0, where the address was found without being given: a socket that listens there
  // already, and belongs to the caller; -1 otherwise.
  int listen_fd = -1;
  // Where this was found: "the launcher's variables", "Open MPI", "MPICH", "Slurm"; empty for a
  // process without a launcher.
  std::string source = {};
  // Tells apart jobs, and attempts of one job, that use the same address.
  std::string job = "job";
  // Under mpirun over several hosts: the ranks' secret, where LOCKSTEP_TOKEN gives them none.
  std::string secret = {};

  // "rank 1 of 4 (Slurm), meeting at node1:23456"
  std::string describe() const;
};

// The first of these that is there:
//   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT: `lockstep run`,
//     torchrun, Kubernetes' training operator
//   Open MPI's mpirun: OMPI_COMM_WORLD_*; MPICH's: PMI_RANK, PMI_SIZE, MPI_LOCAL*; MVAPICH's:
//     MV2_COMM_WORLD_*
//   a task of Slurm's srun: SLURM_PROCID and the like, used only together with srun's
//     SLURM_STEP_ID, since the shells of sbatch and salloc have a SLURM_PROCID, too
// MASTER_ADDR and MASTER_PORT count with all of them. Where they are not given: on one host the
// loopback interface, over several the first of Slurm's nodes; and a port from 20000 to 29999 that
// follows from the job's id, so that all ranks name the same. Under an mpirun over several hosts
// rank 0 takes a free port and tells the others over mpirun's process manager: the first call
// blocks until all ranks have called, at most for LOCKSTEP_TIMEOUT seconds (300), and later ones
// give the same without listen_fd. Programs of MPI's own have to be given both. Otherwise a job of
// one rank. Throws ConfigError for variables that are missing, malformed or contradict each other,
// CommError when the ranks cannot exchange the address in that way.
Place place_from_env();

// As place_from_env(), without host, port and listen_fd, which take a rendezvous: never blocks.
Place rank_from_env();

// What shows that a launcher has started this process as one rank of a job, such as "RANK and
// WORLD_SIZE are set"; empty without one. A task of srun that is alone on its node is not a rank
// for this: it may start ranks there, as `lockstep run` does. Throws ConfigError for Slurm's
// malformed counts.
std::string launcher_of_rank();

}  // namespace lockstep
