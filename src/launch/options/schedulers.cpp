// Launchers that mpirun has started, in pods of Kubernetes, or in a job of PBS or LSF.
#include <fmt/format.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "core/network/address.h"
#include "core/place/secret.h"
#include "core/place/sources.h"
#include "launch/rendezvous/rendezvous.h"
#include "lockstep/core/environment.h"

namespace lockstep::launch {
namespace {

size_t different_words(std::istream&& text) {
  std::set<std::string> words;
  for (std::string word; text >> word;) words.insert(word);
  return words.size();
}

// The number of pods of a training operator, each of which has one launcher; 1 where the variables
// are not its, or those of a rank.
int pods() {
  for (const char* name : {"RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    if (!env_text(name)) return 1;
  }
  if (env_text("LOCAL_RANK")) return 1;
  return static_cast<int>(env_int("WORLD_SIZE", 1, kMostRanks).value_or(1));
}

}  // namespace

std::optional<Rendezvous> Rendezvous::from_pods() {
  const int count = pods();
  if (count == 1 || !has_token()) return std::nullopt;
  Rendezvous rendezvous;
  rendezvous.set_nodes(std::to_string(count));
  rendezvous.node_rank = required("RANK", "WORLD_SIZE", 0, count - 1);
  const auto port = static_cast<uint16_t>(required("MASTER_PORT", "MASTER_ADDR", 1, 65535));
  rendezvous.endpoint = Endpoint::parse("MASTER_ADDR", *env_text("MASTER_ADDR"), port).text();
  return rendezvous;
}

std::string remark_on_pods() {
  const int count = pods();
  if (count == 1 || has_token()) return "";
  return fmt::format(
      "RANK={} and WORLD_SIZE={} without LOCAL_RANK are those of a pod of Kubernetes' training "
      "operator: all ranks start on this host; with LOCKSTEP_TOKEN or LOCKSTEP_TOKEN_FILE in every "
      "pod their launchers run one job (--standalone: as meant)",
      *env_text("RANK"), count);
}

std::string remark_on_pbs_and_lsf() {
  if (env_text("RANK") || env_text("SLURM_JOB_ID")) return "";
  const auto file = env_text("PBS_NODEFILE"), list = env_text("LSB_HOSTS");
  const size_t hosts = file ? different_words(std::ifstream(*file))
                            : different_words(std::istringstream(list.value_or("")));
  if (hosts < 2) return "";
  return fmt::format(
      "this job has {} hosts ({}): all ranks start on this one; start lockstep run --nnodes {} "
      "--rdzv-endpoint HOST:PORT ... on each of them (--standalone: as meant)",
      hosts, file ? "PBS_NODEFILE" : "LSB_HOSTS", hosts);
}

void refuse_launchers_of_mpirun() {
  if (env_text("RANK")) return;
  const char* const hydra = env_text("MPI_LOCALNRANKS") ? "PMI_SIZE" : "";
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", hydra}) {
    const auto launchers = env_int(name, 1, kMostRanks);
    if (launchers.value_or(1) == 1) continue;
    throw ConfigError(fmt::format(
        "[run] mpirun has started {} launchers ({}={}), each of which starts a job of its own: "
        "write mpirun PROGRAM, a process for each rank and no launcher; or one launcher on each "
        "host, with --nnodes and --rdzv-endpoint (--standalone: as meant)",
        *launchers, name, *launchers));
  }
}

}  // namespace lockstep::launch
