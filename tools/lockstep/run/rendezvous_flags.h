// The flags of `lockstep run` about jobs on several hosts.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "launch/rendezvous/rendezvous.h"

namespace lockstep::tool {

class RendezvousFlags {
 public:
  void add_to(CLI::App& command);
  // Once the flags are parsed: how the hosts meet; nothing for a job on one host. `master_port`: 0
  // when not given. Throws ConfigError.
  std::optional<launch::Rendezvous> chosen(int master_port) const;
  // Whether ranks are to encrypt what they send each other, as launchers do then.
  bool tls() const { return tls_; }

 private:
  static constexpr const char* kNoNodes = "1:1";
  std::string nodes_ = kNoNodes, backend_, endpoint_, conf_, master_addr_, local_addr_;
  int node_rank_ = -1, spares_ = -1;
  bool tls_ = false, standalone_ = false;
};

}  // namespace lockstep::tool
