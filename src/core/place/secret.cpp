#include "core/place/secret.h"

#include <map>
#include <memory>
#include <mutex>

#include "core/place/sources.h"
#include "core/security/job_secret.h"
#include "core/security/local_secret.h"
#include "core/security/munge.h"
#include "core/security/token.h"
#include "lockstep/core/environment.h"

namespace lockstep {
namespace {

struct Agreed {
  std::string secret = {};
  // Of rank 0, while it serves: of ranks on several hosts, or on this one.
  std::shared_ptr<SecretServer> server = nullptr;
  std::shared_ptr<LocalSecretServer> local_server = nullptr;
};

struct Known {
  std::mutex mutex = {};
  std::map<std::string, Agreed> by_job = {};
};

// Not destroyed: rank 0 may exit while it serves.
Known& known() {
  static auto& all = *new Known;
  return all;
}

constexpr const char* kAdvice =
    "; give the ranks one: export LOCKSTEP_TOKEN=$(openssl rand -hex 32)";

bool is_on_this_host(const Place& place) {
  return place.local_size == place.size && place.host == kLoopback;
}

// Ids are often those of processes: jobs in containers that share the host's network may have the
// same id, but not the same port.
std::string name_of(const Place& place) {
  return is_on_this_host(place) ? fmt::format("{} {}", place.job, place.port) : place.job;
}

Agreed on_this_host(const Place& place, std::chrono::milliseconds timeout) {
  Agreed agreed;
  if (place.rank == 0) {
    agreed.secret = hex_of(random_bytes());
    agreed.local_server = std::make_shared<LocalSecretServer>(name_of(place), agreed.secret);
  } else {
    agreed.secret = ask_for_local_secret(name_of(place), timeout);
  }
  return agreed;
}

// By MUNGE.
Agreed over_hosts(const Place& place, std::chrono::milliseconds timeout) {
  const uint16_t port = secret_port_of(place.job, place.port);
  Agreed agreed;
  if (!munge::fault().empty()) {
    if (place.rank != 0) return agreed;
    try {
      agreed.server = std::make_shared<SecretServer>(port, SecretServer::None());
    } catch (const Error&) {
      // On hosts without MUNGE no rank asks.
    }
  } else if (place.rank == 0) {
    agreed.secret = hex_of(random_bytes());
    agreed.server = std::make_shared<SecretServer>(port, place.job, agreed.secret);
  } else {
    agreed.secret = ask_for_secret(place.host, port, place.job, timeout);
  }
  return agreed;
}

}  // namespace

bool has_token() { return env_text("LOCKSTEP_TOKEN") || env_text("LOCKSTEP_TOKEN_FILE"); }

bool has_given_secret() { return env_text(kJobKeyVariable) || has_token(); }

std::string agreed_secret(const Place& place, std::chrono::milliseconds timeout) {
  if (has_given_secret()) return {};
  if (!place.secret.empty()) return place.secret;
  const bool is_here = is_on_this_host(place);
  const bool by_munge = place.source == "Slurm" && place.local_size != place.size;
  // Another launcher's ranks may be of several users.
  if (!by_munge && !(is_here && place.source != kPlainLauncher)) return {};
  auto& [mutex, by_job] = known();
  const std::lock_guard lock(mutex);
  const std::string name = name_of(place);
  if (const auto found = by_job.find(name); found != by_job.end()) return found->second.secret;
  try {
    const Agreed agreed = is_here ? on_this_host(place, timeout) : over_hosts(place, timeout);
    return by_job.emplace(name, agreed).first->second.secret;
  } catch (const CommError& error) {
    throw CommError(fmt::format("[environment] {}{}", error.what(), kAdvice));
  } catch (const Error& error) {
    contradiction("{}{}", error.what(), kAdvice);
  }
}

void end_serving(const Place& place) {
  auto& [mutex, by_job] = known();
  const std::lock_guard lock(mutex);
  const auto found = by_job.find(name_of(place));
  if (found == by_job.end()) return;
  found->second.server.reset();
  found->second.local_server.reset();
}

}  // namespace lockstep
