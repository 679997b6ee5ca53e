#include "core/place/secret.h"

#include <map>
#include <mutex>

#include "core/place/sources.h"
#include "core/security/munge.h"
#include "core/security/token.h"
#include "lockstep/core/environment.h"

namespace lockstep {

bool has_token() { return env_text("LOCKSTEP_TOKEN") || env_text("LOCKSTEP_TOKEN_FILE"); }

bool has_given_secret() { return env_text(kJobKeyVariable) || has_token(); }

AgreedSecret agreed_secret(const Place& place, std::chrono::milliseconds timeout) {
  if (has_given_secret()) return {};
  const bool is_on_one_host = place.local_size == place.size;
  if (place.source != "Slurm" || is_on_one_host) return {.text = place.secret};
  static std::mutex mutex;
  static std::map<std::string, std::string> known;  // by job
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(place.job); found != known.end()) return {found->second};
  if (!munge::fault().empty()) return {};
  constexpr const char* kAdvice =
      "; give the ranks one: export LOCKSTEP_TOKEN=$(openssl rand -hex 32)";
  const uint16_t port = secret_port_of(place.job, place.port);
  AgreedSecret agreed;
  if (place.rank == 0) {
    agreed.text = hex_of(random_bytes());
    try {
      agreed.server = std::make_shared<SecretServer>(port, place.job, agreed.text);
    } catch (const Error& error) {
      contradiction("{}{}", error.what(), kAdvice);
    }
  } else {
    try {
      agreed.text = ask_for_secret(place.host, port, place.job, timeout);
    } catch (const CommError& error) {
      throw CommError(fmt::format("[environment] {}{}", error.what(), kAdvice));
    }
  }
  known.emplace(place.job, agreed.text);
  return agreed;
}

}  // namespace lockstep
