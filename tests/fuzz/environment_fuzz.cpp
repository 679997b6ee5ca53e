// Any bytes as Slurm's node lists and task counts, as numbers, and as --tee's map: a value or a
// ConfigError, nothing else.
#include <cstdlib>
#include <string>

#include "core/place/node_list.h"
#include "launch/output/streams.h"
#include "launch/rendezvous/rendezvous.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"
#include "lockstep/core/place.h"

namespace {

template <class Call>
void attempt(const Call& call) {
  try {
    call();
  } catch (const lockstep::ConfigError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, size_t size) {
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data + 1), size - 1);
  attempt([&] {
    for (const auto& name : lockstep::expand_node_list(text)) {
      if (name.empty()) std::abort();
    }
  });
  attempt([&] { lockstep::expand_task_counts(text); });
  attempt([&] {
    lockstep::launch::StreamChoice::parse("--tee", text)
        .covers(3, lockstep::launch::StreamChoice::Err);
  });
  if (text.find('\0') != std::string::npos) return 0;
  // One of a Slurm task's variables is damaged.
  const char* const variables[][2] = {{"SLURM_STEP_ID", "0"},
                                      {"SLURM_JOB_ID", "7"},
                                      {"SLURM_PROCID", "1"},
                                      {"SLURM_NTASKS", "4"},
                                      {"SLURM_LOCALID", "1"},
                                      {"SLURM_NODEID", "0"},
                                      {"SLURM_STEP_NODELIST", "n[1-2]"},
                                      {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                                      {"SLURM_STEP_NUM_TASKS", "4"},
                                      {"LOCKSTEP_TOKEN", "0123456789abcdef"}};
  for (size_t i = 0; i < std::size(variables); ++i) {
    setenv(variables[i][0], i == data[0] % std::size(variables) ? text.c_str() : variables[i][1],
           1);
  }
  attempt([&] {
    const lockstep::Place place = lockstep::place_from_env();
    if (place.rank < 0 || place.rank >= place.size) std::abort();
  });
  // The same variables for a launcher on each node.
  attempt([&] {
    const auto rendezvous = lockstep::launch::Rendezvous::from_slurm();
    if (rendezvous && *rendezvous->node_rank >= rendezvous->max_nodes) std::abort();
  });
  return 0;
}
