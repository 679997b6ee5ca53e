// Launchers that mpirun has started, or that run in a job of PBS or LSF.
#include <fmt/format.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>

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

}  // namespace

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
