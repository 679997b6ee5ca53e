#include "lockstep/core/place.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "core/hash/mix.h"
#include "core/place/node_list.h"
#include "core/place/sources.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/log.h"

namespace lockstep {
namespace {

std::optional<int> number(const char* name, int low, int high) {
  const auto value = env_int(name, low, high);
  if (!value) return std::nullopt;
  return static_cast<int>(*value);
}

// A rank that a launcher has started is its child, and no task of srun's itself.
void warn_of_worlds_of_one() {
  const int tasks = number("SLURM_STEP_NUM_TASKS", 1, kMostRanks).value_or(1);
  if (tasks == 1 || !slurm_step() || number("SLURM_TASK_PID", 1, INT_MAX) != getpid()) return;
  log::warn(fmt::format(
      "WORLD_SIZE=1, but SLURM_STEP_NUM_TASKS={}: each of the {} tasks runs as a single process; "
      "for one world of all unset RANK and WORLD_SIZE before srun, and start no launcher around it",
      tasks, tasks));
}

// Variables of launchers whose ranks cannot be told from them alone.
void warn_of_unknown_launcher() {
  for (const auto& [rank, size] :
       {std::pair("PMI_RANK", "PMI_SIZE"), std::pair("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        std::pair("PMIX_RANK", "")}) {
    const auto value = env_text(rank), of = env_text(size);
    if (!value || of == "1") continue;
    log::warn(fmt::format(
        "{}={}{} is of a launcher that Lockstep does not know: running as a single process; set "
        "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for a world "
        "of all",
        rank, *value, of ? fmt::format(" of {}={}", size, *of) : ""));
    return;
  }
}

std::optional<Place> place_from_launcher() {
  const auto rank = number("RANK", 0, kMostRanks), size = number("WORLD_SIZE", 1, kMostRanks);
  if (rank.has_value() != size.has_value()) {
    contradiction("{} is set, but {} is not: set both, or neither for a single process",
                  rank ? "RANK" : "WORLD_SIZE", rank ? "WORLD_SIZE" : "RANK");
  }
  if (!rank) return std::nullopt;
  Place place{.rank = *rank,
              .size = *size,
              .local_rank = number("LOCAL_RANK", 0, kMostRanks),
              .local_size = number("LOCAL_WORLD_SIZE", 1, kMostRanks),
              .source = kPlainLauncher};
  place.job = fmt::format("{}/{}", env_text("TORCHELASTIC_RUN_ID").value_or("job"),
                          env_text("TORCHELASTIC_RESTART_COUNT").value_or("0"));
  if (place.rank >= place.size) {
    contradiction("RANK={} with WORLD_SIZE={}: ranks count from 0", place.rank, place.size);
  }
  if (place.local_size && *place.local_size > place.size) {
    contradiction("LOCAL_WORLD_SIZE={} with WORLD_SIZE={}: a host has no more ranks than the world",
                  *place.local_size, place.size);
  }
  if (place.local_rank && place.local_size && *place.local_rank >= *place.local_size) {
    contradiction("LOCAL_RANK={} with LOCAL_WORLD_SIZE={}: local ranks count from 0",
                  *place.local_rank, *place.local_size);
  }
  if (place.size == 1) warn_of_worlds_of_one();
  return place;
}

// Of the launcher that is there; without one the source is empty.
Place found_place() {
  auto found = place_from_launcher();
  if (!found) found = place_from_mpi();
  if (!found) found = place_from_slurm();
  if (!found) warn_of_unknown_launcher();
  return found.value_or(Place{});
}

// The process manager serves each process once.
Place met_over_mpirun(Place place) {
  static std::optional<Place> met;
  if (met) return *met;
  meet_over_mpirun(place);
  met = place;
  met->listen_fd = -1;
  return place;
}

}  // namespace

int port_of(std::string_view job_id) {
  const auto hash = fnv1a<uint32_t>(job_id);
  return 20'000 + static_cast<int>((hash ^ hash >> 16) % 10'000);
}

uint16_t secret_port_of(const std::string& job_id, int taken) {
  const int port = port_of(job_id + "/secret");
  return static_cast<uint16_t>(port == taken ? port + 1 : port);
}

int required(const char* name, const char* because, int low, int high) {
  const auto value = number(name, low, high);
  if (!value)
    contradiction("{} is set, but {} is not: unset the one or set the other", because, name);
  return *value;
}

std::string Place::describe() const {
  if (source.empty()) return "a single process";
  const std::string where = size > 1 ? fmt::format(", meeting at {}:{}", host, port) : "";
  return fmt::format("rank {} of {} ({}){}", rank, size, source, where);
}

Place rank_from_env() {
  Place place = found_place();
  place.host.clear();
  place.port = 0;
  return place;
}

std::string launcher_of_rank() {
  if (env_text("RANK") && env_text("WORLD_SIZE")) return "RANK and WORLD_SIZE are set";
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "MPI_LOCALNRANKS"}) {
    if (env_text(name)) return fmt::format("{} is set", name);
  }
  const auto counts = env_text("SLURM_STEP_TASKS_PER_NODE");
  if (!slurm_step() || !env_text("SLURM_PROCID") || !counts) return "";
  const auto each = expand_task_counts(*counts);
  const bool is_rank = std::any_of(each.begin(), each.end(), [](int count) { return count > 1; });
  return is_rank ? "srun has started several tasks on a node" : "";
}

Place place_from_env() {
  Place place = found_place();
  if (place.source.empty()) return place;
  if (place.size == 1) {
    place.host.clear();
    place.port = 0;
    return place;
  }
  if (place.host.empty() && place.local_size == place.size && place.port != 0) {
    place.host = kLoopback;
  }
  if (const auto host = env_text("MASTER_ADDR")) place.host = *host;
  if (const auto port = number("MASTER_PORT", 1, 65535)) place.port = *port;
  if (place.host.empty() && can_meet_over_mpirun(place)) return met_over_mpirun(place);
  if (place.host.empty() || place.port == 0) {
    contradiction(
        "WORLD_SIZE={} needs {}: where the ranks meet, the same on all of them ({}; a launcher "
        "such as `lockstep run` sets it)",
        place.size, place.host.empty() ? "MASTER_ADDR" : "MASTER_PORT", place.source);
  }
  return place;
}

}  // namespace lockstep
