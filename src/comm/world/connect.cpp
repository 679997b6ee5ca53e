#include "comm/world/connect.h"

#include <fmt/format.h>
#include <signal.h>

#include <memory>
#include <utility>

#include "comm/cuda_ipc/transport.h"
#include "comm/device/device.h"
#include "comm/gloo/transport.h"
#include "comm/hierarchical/transport.h"
#include "comm/nccl/transport.h"
#include "comm/tcp/transport.h"
#include "comm/text.h"
#include "comm/world/sharing.h"
#include "core/process/descriptors.h"
#include "core/time_limit.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::comm {
namespace {

constexpr std::pair<std::string_view, Backend> kBackends[] = {
    {"auto", Backend::Auto},       {"shm", Backend::Shm},   {"tcp", Backend::Tcp},
    {"gloo", Backend::Gloo},       {"nccl", Backend::Nccl}, {"host-then-net", Backend::HostThenNet},
    {"cuda_ipc", Backend::CudaIpc}};

// This rank's device, once each rank is known to have one, all of the same kind.
at::Device own_device(const std::vector<Member>& members, const std::vector<LocalRank>& local_ranks,
                      int rank, Backend asked) {
  std::vector<at::Device> devices;
  for (size_t i = 0; i < members.size(); ++i) {
    const Member& member = members[i];
    try {
      // A launcher may call every rank local rank 0, each with a device of its own.
      devices.push_back(device_at(
          member.devices,
          {member.local_rank < 0 ? local_ranks[i].rank : member.local_rank, local_ranks[i].size},
          asked));
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("{} (rank {})", error.what(), i));
    }
  }
  const auto kind = [&](size_t i) {
    return c10::DeviceTypeName(devices[i].type(), /*lower_case=*/true);
  };
  for (size_t i = 1; i < devices.size(); ++i) {
    if (devices[i].type() == devices[0].type()) continue;
    throw ConfigError(
        fmt::format("[device] rank 0 computes on {}, rank {} on {}: set LOCKSTEP_DEVICE=cpu for "
                    "all, or give every "
                    "host GPUs",
                    kind(0), i, kind(i)));
  }
  return devices[rank];
}

// Ranks of one host that cannot share memory talk over the network, unless that was ruled out.
void check_sharing(Backend asked, const std::string& problem, int rank) {
  if (problem.empty()) return;
  if (asked == Backend::Shm || asked == Backend::HostThenNet || asked == Backend::CudaIpc) {
    throw CommError(fmt::format("[comm] the {} backend was asked for, but {}: use auto{}",
                                name_of(asked), problem,
                                asked == Backend::CudaIpc ? "" : " or tcp"));
  }
  if (rank == 0)
    log::warn(fmt::format("[comm] {}: they communicate over TCP, which is slower", problem));
}

// Without descriptors connections fail, and the others wait for them until the deadline.
void check_descriptors(int ranks) {
  const auto [used, limit] = descriptors();
  constexpr int kSpare = 16;  // of the group itself
  if (used + ranks + kSpare <= limit) return;
  throw CommError(
      fmt::format("[comm] connections to {} ranks need {} more descriptors, but {} of at most {} "
                  "are in use: raise the limit (ulimit -n, "
                  "LimitNOFILE= of systemd, --ulimit nofile= of a container)",
                  ranks, ranks + kSpare, used, limit));
}

// Whether ranks that are so distributed can have the transport that was asked for.
void check_layout(Backend asked, int hosts, int ranks) {
  if (asked == Backend::Shm && hosts > 1) {
    contradiction(
        "the shm backend was asked for, but the {} ranks are on {} hosts: use auto or tcp", ranks,
        hosts);
  }
  if (asked == Backend::CudaIpc && hosts > 1) {
    contradiction(
        "the cuda_ipc backend was asked for, but the {} ranks are on {} hosts: use auto or nccl",
        ranks, hosts);
  }
  if (asked == Backend::HostThenNet && (hosts == 1 || hosts == ranks)) {
    contradiction(
        "the host-then-net backend was asked for, but the {} ranks are on {} {}: use auto", ranks,
        hosts, hosts == 1 ? "host" : "hosts, one on each");
  }
}

}  // namespace

void survive_broken_connections() {
  struct sigaction now {};
  sigaction(SIGPIPE, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

Backend backend_from_env(Backend asked) {
  const auto text = env_text("LOCKSTEP_BACKEND");
  if (!text || *text == "auto") return asked;
  for (const auto& [name, backend] : kBackends) {
    if (name == *text) return backend;
  }
  contradiction(
      "LOCKSTEP_BACKEND='{}' is none of auto, shm, tcp, gloo, host-then-net, nccl, cuda_ipc{}",
      *text,
      *text == "mpi" ? ": ranks that mpirun starts find each other without it, so leave it out"
                     : "");
}

std::string name_of(Backend backend) {
  for (const auto& [name, one] : kBackends) {
    if (one == backend) return std::string(name);
  }
  return "?";
}

std::chrono::milliseconds checked_timeout(std::string_view who, std::chrono::milliseconds asked) {
  if (asked > std::chrono::milliseconds(0)) return bounded(asked);
  throw ConfigError(
      fmt::format("[comm] {}: a timeout of {}: the ranks need time to meet", who, text_of(asked)));
}

bool net_from_env() {
  const auto text = env_text("LOCKSTEP_NET");
  if (!text || *text == "tcp") return true;
  if (*text == "gloo") return false;
  contradiction("LOCKSTEP_NET='{}' is none of tcp, gloo", *text);
}

std::optional<Digest> common_key(const Asked& asked, std::string_view job) {
  return asked.secret.empty() ? job_key_from_env(job) : Token(asked.secret).key("ranks", job);
}

std::optional<Digest> tls_key_from_env(const Asked& asked, std::string_view job) {
  if (env_int("LOCKSTEP_TLS", 0, 1).value_or(asked.tls ? 1 : 0) == 0) return std::nullopt;
  if (!asked.over_tcp) {
    const bool by_name = asked.backend == Backend::Gloo;
    contradiction(
        "TLS was asked for (LOCKSTEP_TLS=1, or the option tls), but {} sends everything as it is: "
        "use tcp (unset {})",
        by_name ? "gloo" : "LOCKSTEP_NET=gloo",
        by_name ? "LOCKSTEP_BACKEND and LOCKSTEP_PYTHON_PEERS" : "LOCKSTEP_NET");
  }
  const auto key = common_key(asked, job);
  if (!key) {
    contradiction(
        "TLS was asked for (LOCKSTEP_TLS=1, or the option tls), but the ranks share no secret: "
        "start them with `lockstep run`, or give all of them the same LOCKSTEP_TOKEN_FILE or "
        "LOCKSTEP_TOKEN");
  }
  return key;
}

AskedTransport shared_part(const Asked& asked) {
  return {.backend = name_of(asked.backend),
          .net = asked.over_tcp ? "tcp" : "gloo",
          .tls = asked.tls_key
                     ? hex_of(hmac(lockstep::text_of(*asked.tls_key), {"same"})).substr(0, 16)
                     : ""};
}

Connection connect(const Store& own, int rank, const std::vector<Member>& members,
                   const Asked& asked) {
  const int size = static_cast<int>(members.size());
  Topology layout;
  for (int r = 0; r < size; ++r) {
    layout.members.push_back(r);
    layout.hosts.push_back(members[r].host);
    layout.doors.push_back(members[r].door);
  }
  const auto local_ranks = layout.local_ranks();
  Connection connection;
  connection.local_rank = local_ranks[rank].rank;
  connection.local_size = local_ranks[rank].size;
  connection.hosts = static_cast<int>(layout.by_host().size());
  const bool is_plain = asked.backend == Backend::Gloo || asked.backend == Backend::Tcp;
  const bool is_flat = asked.backend == Backend::Tcp || connection.hosts == size;
  const auto over = std::make_shared<std::shared_ptr<Net>>();
  const MakeNet between_hosts = [over, over_tcp = asked.over_tcp, is_flat, own, rank, size,
                                 timeout = asked.timeout, tls_key = asked.tls_key](
                                    const Store& at,
                                    const NetMembers& net) -> std::shared_ptr<Transport> {
    if (!over_tcp) {
      check_descriptors(static_cast<int>(net.members.size()));
      return make_gloo_transport(
          at, net.rank, static_cast<int>(net.members.size()),
          {.timeout = timeout, .members = net.members, .nodes = net.nodes, .ranks = net.ranks});
    }
    // Of host-then-net's plain group most connections are never made.
    if (!net.nodes.empty() || is_flat) check_descriptors(static_cast<int>(net.members.size()));
    // One for all groups of the world, where there is any that needs it: all ranks come at once.
    if (!*over) *over = make_net(own.prefix("net"), rank, size, timeout, tls_key);
    return make_tcp_transport(
        *over, at, net.rank,
        {.timeout = timeout, .members = net.members, .nodes = net.nodes, .ranks = net.ranks});
  };
  check_layout(asked.backend, connection.hosts, size);
  connection.device = own_device(members, local_ranks, rank, asked.backend);
  if (asked.tls_key && !connection.device.is_cpu() && connection.hosts > 1) {
    contradiction(
        "TLS was asked for (LOCKSTEP_TLS=1, or the option tls), but NCCL sends the tensors of "
        "GPUs on {} hosts as they are: encrypt the network (WireGuard, IPsec), or set "
        "LOCKSTEP_DEVICE=cpu",
        connection.hosts);
  }
  take(connection.device);
  if (!is_plain) {
    const Sharing sharing = try_sharing(own, rank, std::move(layout), asked.timeout);
    layout = sharing.layout;
    check_sharing(asked.backend, sharing.problem, rank);
  }
  auto transport = is_plain ? between_hosts(own, {.rank = rank, .members = layout.members})
                            : make_transport(own, rank, layout, asked.timeout, between_hosts);
  if (!connection.device.is_cpu()) {
    const bool is_ipc = asked.backend == Backend::CudaIpc;
    const MakeDeviceTransport make = is_ipc ? &make_cuda_ipc_transport : &make_nccl_transport;
    transport = make(own.prefix(is_ipc ? "cuda_ipc" : "nccl"), std::move(transport),
                     {connection.device, layout, asked.timeout});
  }
  connection.group = Group(std::move(transport));
  connection.is_encrypted = asked.tls_key && *over;
  return connection;
}

}  // namespace lockstep::comm
