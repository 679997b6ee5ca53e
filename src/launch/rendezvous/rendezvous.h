// How the launchers of a job on several hosts find each other and stay together. What they agree
// on, and how, is written in docs/launching_protocol.md.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "launch/job/run.h"

namespace lockstep::launch {

struct Rendezvous {
  // The range of the number of hosts.
  int min_nodes = 1;
  int max_nodes = 1;
  // This host's number, when the user gives one; 0 is the coordinator then.
  std::optional<int> node_rank = std::nullopt;
  // The coordinator: "host1:29400", the same on every host.
  std::string endpoint = {};
  // This host's address for the others; the one from which it reaches the endpoint when empty.
  std::string local_addr = {};
  // Whether this launcher is the coordinator; when not given: the launcher of node rank 0, else the
  // one that has the endpoint's address and gets its port.
  std::optional<bool> is_host = std::nullopt;
  bool tls = false;
  // Whether a host that runs another command (the program's name and its arguments) is refused.
  bool same_command = true;
  // How many launchers beyond max_nodes may wait for the place of a host that is lost; any number
  // when not given. The coordinator's counts.
  std::optional<int> spares = std::nullopt;
  // TORCHELASTIC_RUN_ID where the options give none.
  std::string run_id = "none";
  // Where the job has no token: the port of node 0's host at which its launcher hands out one to
  // launchers of its user and job (core/security/job_secret.h).
  std::optional<uint16_t> secret_port = std::nullopt;

  // --rdzv-conf: docs/launching.md has the keys.
  std::chrono::milliseconds join_timeout{600'000};
  std::chrono::milliseconds last_call_timeout{30'000};
  std::chrono::milliseconds heartbeat_timeout{5'000};
  std::chrono::milliseconds keep_alive_interval{1'000};
  std::chrono::milliseconds rejoin_timeout{30'000};

  // That of the launchers which one srun of Slurm has started, one on each of several nodes;
  // nothing for a single task, and where another launcher has started this process. Throws
  // ConfigError, with what to write, when several are on one node, or when the job has no token and
  // this host no MUNGE.
  static std::optional<Rendezvous> from_slurm();
  // That of the launchers in the pods of a training operator of Kubernetes, one in each: RANK and
  // WORLD_SIZE count pods where there is no LOCAL_RANK. Nothing without a token, since a shell may
  // have such variables of another job. Throws ConfigError for numbers that contradict each other.
  static std::optional<Rendezvous> from_pods();

  // "4" or "2:4". Throws ConfigError.
  void set_nodes(std::string_view text);
  // "join_timeout=60,tls=1". Throws ConfigError that names the key, the nearest known one, or the
  // value.
  void set_conf(std::string_view text);
};

// What to say of a launcher without flags of several hosts in a shell of a Slurm job that has
// several nodes, such as its batch script, where srun has not started it; else empty.
std::string remark_on_slurm();
// What to say where a Slurm task may use fewer cores than its job has on the node, and `asked`
// (auto or cpu) was one of the `ranks` for each; else empty.
std::string remark_on_cores(std::string_view asked, int ranks);
// What to say of a launcher that has the variables of one of several pods, and no token; else
// empty.
std::string remark_on_pods();
// As remark_on_slurm() in a job of PBS or LSF that has several hosts.
std::string remark_on_pbs_and_lsf();
// Throws ConfigError, with what to write, where mpirun has started several launchers: each would
// start a job of its own.
void refuse_launchers_of_mpirun();

// As run(), on this host and with the launchers of others; on every host the root cause of a
// failure is named, and the exit status is its rank's. The token of the job comes from
// LOCKSTEP_TOKEN or LOCKSTEP_TOKEN_FILE, or is handed out at Rendezvous::secret_port.
int run_on_hosts(const Options& options, const Rendezvous& rendezvous);

// What run_on_hosts() would start on this host, for people. Throws ConfigError and StartError as it
// does, but looks up no host and needs no token; starts nothing.
std::string describe_on_hosts(const Options& options, const Rendezvous& rendezvous);

}  // namespace lockstep::launch
