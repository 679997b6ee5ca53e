#include "run/rendezvous_flags.h"

#include <fmt/format.h>

#include "core/network/address.h"
#include "flags.h"

namespace lockstep::tool {
namespace {

constexpr int kStaticPort = 29500;  // torchrun's

}  // namespace

void RendezvousFlags::add_to(CLI::App& command) {
  const auto option = [&command](const std::string& name, auto& value, const char* type,
                                 const char* description) {
    return command.add_option(both_spellings(name), value, description)
        ->envname(variable_of(name))
        ->type_name(type);
  };
  option("--nnodes", nodes_, "N|MIN:MAX", "Hosts of the job, each with a launcher of its own (1)");
  command.add_flag("--standalone", standalone_, "One host, also in a Slurm job of several hosts")
      ->envname(variable_of("--standalone"));
  option("--rdzv-endpoint", endpoint_, "HOST:PORT",
         "Where the launchers meet, the same on each host (port 29400); the one\nwhose address it "
         "is leads");
  option("--rdzv-backend", backend_, "NAME",
         "static: the host of --node-rank 0 leads; c10d: see above");
  option("--rdzv-conf", conf_, "K=V,K=V",
         "join_timeout=600 last_call_timeout=30 heartbeat_timeout=5\nkeep_alive_interval=1 "
         "rejoin_timeout=30 seconds; tls=0 same_command=1 is_host=1");
  option(
      "--spares", spares_, "N",
      "This many launchers beyond --nnodes may wait for the place of a host\nthat is lost; others "
      "are "
      "refused (any number)")
      ->check(whole_number(0, 49'999));
  option("--node-rank", node_rank_, "N", "This host's number; 0 leads")
      ->check(whole_number(0, 49'999));
  option("--master-addr", master_addr_, "HOST",
         "With --node-rank: the leading host (see --master-port)");
  option("--local-addr", local_addr_, "ADDRESS",
         "Where the other hosts reach this one (as routes say)");
  command
      .add_flag("--tls", tls_,
                "Encrypt what launchers, and ranks of Lockstep, send each other over the\n"
                "network (--rdzv-conf tls=1 and LOCKSTEP_TLS=1)")
      ->envname(variable_of("--tls"));
}

std::optional<launch::Rendezvous> RendezvousFlags::chosen(int master_port) const {
  const bool given = standalone_ || nodes_ != kNoNodes || !endpoint_.empty() ||
                     !master_addr_.empty() || node_rank_ >= 0;
  auto found = given ? std::nullopt : launch::Rendezvous::from_slurm();
  if (!given && !found) found = launch::Rendezvous::from_pods();
  if (!given && !found) {
    launch::refuse_launchers_of_mpirun();
    for (const std::string& remark :
         {launch::remark_on_slurm(), launch::remark_on_pods(), launch::remark_on_pbs_and_lsf()}) {
      if (!remark.empty()) fmt::print(stderr, "lockstep: {}\n", remark);
    }
  }
  auto rendezvous = found.value_or(launch::Rendezvous{});
  if (!found) rendezvous.set_nodes(nodes_);
  if (standalone_ && rendezvous.max_nodes > 1) {
    throw ConfigError(fmt::format(
        "[run] --standalone is one host, and --nnodes is {}: give one of them", nodes_));
  }
  if (!backend_.empty() && backend_ != "static" && backend_ != "c10d") {
    throw ConfigError(fmt::format(
        "[run] --rdzv-backend {} (or PET_RDZV_BACKEND) is not supported: launchers meet at one of "
        "them and need no other service (what works: static, c10d)",
        backend_));
  }
  if (node_rank_ >= 0) rendezvous.node_rank = node_rank_;
  rendezvous.tls = tls_;
  rendezvous.set_conf(conf_);
  if (tls_ && !rendezvous.tls) {
    throw ConfigError(
        "[run] --tls and --rdzv-conf tls=0 say different things about the same: give one of them");
  }
  if (rendezvous.node_rank && *rendezvous.node_rank >= rendezvous.max_nodes) {
    throw ConfigError(fmt::format("[run] --node-rank {} with --nnodes {}: they count from 0",
                                  *rendezvous.node_rank, nodes_));
  }
  if (rendezvous.max_nodes == 1) return std::nullopt;
  rendezvous.local_addr = local_addr_;
  if (spares_ >= 0) rendezvous.spares = spares_;
  if (found) return rendezvous;
  rendezvous.endpoint = endpoint_;
  if (endpoint_.empty() && !master_addr_.empty()) {
    const auto port = static_cast<uint16_t>(master_port > 0 ? master_port : kStaticPort);
    rendezvous.endpoint = Endpoint::parse("--master-addr", master_addr_, port).text();
    if (backend_ != "c10d" && !rendezvous.node_rank) rendezvous.node_rank = 0;
  }
  return rendezvous;
}

}  // namespace lockstep::tool
