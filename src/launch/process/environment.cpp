#include "launch/process/environment.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <random>
#include <string_view>

#include "launch/process/binding.h"
#include "lockstep/core/environment.h"

namespace lockstep::launch {
namespace {

// An outer launcher's, which would be wrong here: with its store rank 0 would not listen, its error
// file is its own. And the job's token, which ranks do not need.
constexpr std::array<std::string_view, 9> kStale = {
    "LOCKSTEP_COLUMNS", "LOCKSTEP_CONTROL_FD",  "LOCKSTEP_FLIGHT_FD",
    "LOCKSTEP_JOB_KEY", "LOCKSTEP_MASTER_PORT", "LOCKSTEP_STORE_FD",
    "LOCKSTEP_TOKEN",   "LOCKSTEP_TOKEN_FILE",  "TORCHELASTIC_USE_AGENT_STORE"};

}  // namespace

std::string random_run_id() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}", device(), device());
}

Variables rank_variables(const Options& options, const Plan& plan, int local) {
  const std::string rank = std::to_string(plan.first_rank + local);
  const std::string world = std::to_string(plan.world_size);
  Variables variables = {
      {"RANK", rank},
      {"WORLD_SIZE", world},
      {"LOCAL_RANK", std::to_string(local)},
      {"LOCAL_WORLD_SIZE", std::to_string(plan.local_ranks)},
      {"MASTER_ADDR", plan.master_addr},
      {"MASTER_PORT", std::to_string(plan.master_port)},
      {"LOCKSTEP_MASTER_PORT", std::to_string(plan.master_port)},
      {"GROUP_RANK", std::to_string(plan.node_rank)},
      {"GROUP_WORLD_SIZE", std::to_string(plan.nodes)},
      {"ROLE_NAME", options.role},
      {"ROLE_RANK", rank},
      {"ROLE_WORLD_SIZE", world},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(plan.restarts)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(plan.max_restarts)},
      {"TORCHELASTIC_RUN_ID", options.run_id},
      {"TORCHELASTIC_ERROR_FILE", ""},  // as torchrun has it where there are no files
  };
  for (const auto& [name, value] : options.environment) {
    const auto own = env_text(name.c_str());
    if (!own || *own == value) variables.emplace(name, value);
  }
  if (!options.preload.empty()) {
    const auto others = env_text("LD_PRELOAD");
    variables.emplace("LD_PRELOAD", others ? options.preload + ":" + *others : options.preload);
  }
  if (!env_text("OMP_NUM_THREADS")) {
    const int own = threads_of(options.binding, local, plan.local_ranks);
    variables.emplace("OMP_NUM_THREADS", std::to_string(own));
  }
  return variables;
}

std::vector<std::string> environment_with(const Variables& variables) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    const bool stale = std::find(kStale.begin(), kStale.end(), name) != kStale.end();
    if (!stale && !variables.contains(std::string(name))) result.emplace_back(text);
  }
  for (const auto& [name, value] : variables) result.push_back(name + "=" + value);
  return result;
}

}  // namespace lockstep::launch
