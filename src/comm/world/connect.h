// Makes a group of ranks that have exchanged their descriptions: chooses the transport and starts
// it.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/store/store.h"
#include "comm/world/rendezvous.h"
#include "core/place/sources.h"
#include "core/security/token.h"
#include "lockstep/comm/world.h"

namespace lockstep::comm {

// What LOCKSTEP_BACKEND says, else `asked`. Throws ConfigError.
Backend backend_from_env(Backend asked);
std::string name_of(Backend backend);
// Whether tcp carries what goes between hosts, rather than gloo (LOCKSTEP_NET). Throws ConfigError.
bool net_from_env();

// A write to a peer that is gone becomes an error: Gloo writes without MSG_NOSIGNAL. Python ignores
// SIGPIPE from the start.
void survive_broken_connections();

// What ranks wait for at most. Throws ConfigError, which begins with `who`, for no time at all.
std::chrono::milliseconds checked_timeout(std::string_view who, std::chrono::milliseconds asked);

struct Asked {
  Backend backend = Backend::Auto;
  bool over_tcp = true;     // whether tcp carries what goes between hosts, rather than gloo
  bool tls = false;         // what the options say
  std::string secret = {};  // of the group; empty: the job's
  std::optional<Digest> tls_key = std::nullopt;
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

// The secret that only the ranks of `job` know, if there is one: see job_key_from_env().
std::optional<Digest> common_key(const Asked& asked, std::string_view job);

// The secret by which the ranks of `job` encrypt what they send each other, where LOCKSTEP_TLS or,
// without it, `asked` says so. Throws ConfigError when tcp does not carry it, or when this process
// has no secret.
std::optional<Digest> tls_key_from_env(const Asked& asked, std::string_view job);

// What all ranks must ask for in the same way.
AskedTransport shared_part(const Asked& asked);

struct Connection {
  Group group;
  int local_rank = 0;
  int local_size = 1;
  int hosts = 1;
  bool is_encrypted = false;  // what goes over the network, if anything does
  at::Device device = at::kCPU;
};

// Every rank calls it, with the members that exchange_members() gave and the store it had. Throws
// ConfigError for a transport that does not suit the layout, CommError when one cannot be had.
Connection connect(const Store& own, int rank, const std::vector<Member>& members,
                   const Asked& asked);

}  // namespace lockstep::comm
