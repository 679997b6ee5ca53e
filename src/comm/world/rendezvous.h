// The exchange of the ranks' descriptions before there is a group.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "comm/device/device.h"
#include "comm/host/threads.h"
#include "comm/store/store.h"

namespace lockstep::comm {

struct Member {
  int world_size = 1;
  int local_rank = -1;  // by the launcher; -1 when it gives none
  std::string host;     // equal for ranks that can share memory
  std::string version;  // of this library
  Devices devices;
  Cores cores;
  std::string backend;  // what LOCKSTEP_BACKEND or WorldOptions::backend asks for
  std::string net;      // what goes between hosts: tcp or gloo
  // What tells apart the secrets by which that is encrypted; empty where it is not.
  std::string tls;
  std::string door;  // where this process is handed memory (see door.h); empty: nowhere
};

struct AskedTransport {
  std::string backend = "auto";
  std::string net = "tcp";
  std::string tls;
};

// This process, as `local_rank` of a world of `world_size`.
Member this_member(int world_size, int local_rank, Devices devices,
                   const AskedTransport& asked = {});

// Every rank calls it; returns all members by rank. Throws ConfigError, on all ranks that have
// come, when they disagree about the world's size, the library's version or the transport, and
// CommError that lists the ranks that have not come within the deadline.
std::vector<Member> exchange_members(const Store& store, int rank, const Member& mine,
                                     std::chrono::milliseconds timeout);

}  // namespace lockstep::comm
