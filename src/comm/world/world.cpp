#include "lockstep/comm/world.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <optional>
#include <utility>

#include "comm/device/device.h"
#include "comm/gloo/transport.h"
#include "comm/host/threads.h"
#include "comm/store/keys.h"
#include "comm/world/connect.h"
#include "comm/world/rendezvous.h"
#include "core/network/address.h"
#include "core/place/secret.h"
#include "core/process/descriptors.h"
#include "core/process/own_process.h"
#include "core/process/standard_streams.h"
#include "core/security/token.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/flight.h"
#include "lockstep/core/log.h"
#include "lockstep/core/place.h"

namespace lockstep::comm {

struct World::State {
  // The server is kept beyond this, and a process may end without destroying it (_exit()). Ranks
  // that form a group with this one would wait for it.
  ~State() {
    group = Group();
    if (store) store->linger();
  }

  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  int hosts = 1;
  bool is_encrypted = false;
  at::Device device = at::kCPU;
  std::optional<Store> store = std::nullopt;  // rank 0's serves the others
  KeyValueStore keys = own_keys(WorldOptions().timeout);
  Group group = Group();
};

namespace {

constexpr int kMost = 1 << 20;

// The device that the options ask for, or that the backend implies.
DeviceKind check_device(DeviceKind asked, Backend backend, bool python_peers) {
  const bool on_gpu = backend == Backend::Nccl || backend == Backend::CudaIpc;
  const bool on_cpu = python_peers || (backend != Backend::Auto && !on_gpu);
  if (on_cpu && asked == DeviceKind::Cuda) {
    contradiction(
        "LOCKSTEP_DEVICE=cuda needs the nccl backend, and ranks of this library alone: use "
        "LOCKSTEP_BACKEND=auto");
  }
  if (on_gpu && asked == DeviceKind::Cpu) {
    contradiction(
        "LOCKSTEP_BACKEND={} is for GPUs, but LOCKSTEP_DEVICE=cpu: use auto for one of them",
        name_of(backend));
  }
  if (on_cpu) return DeviceKind::Cpu;
  return on_gpu ? DeviceKind::Cuda : asked;
}

// Ranks that a rank starts, with a port of their own, inherit the variable.
bool listens_at(int fd, int port) {
  int listens = 0;
  socklen_t length = sizeof listens;
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && listens != 0 &&
         local_address(fd).port() == port;
}

// The store, under keys that belong to this attempt of the job and this world of the process.
Store meet_at_store(const Place& place, const WorldOptions& world, const Asked& asked) {
  StoreOptions options{.host = place.host,
                       .port = place.port,
                       .for_others = !place.local_size || *place.local_size < place.size,
                       .timeout = world.timeout};
  // torchrun serves the store itself.
  const bool of_torchrun = env_text("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  options.server = place.rank == 0 && !of_torchrun;
  // Python's clients and servers have no use for a key.
  if (!of_torchrun && !world.python_peers) options.key = common_key(asked, place.job);
  static bool took_socket = false;
  if (options.server && !took_socket) {
    const auto fd = env_int("LOCKSTEP_STORE_FD", 3, kMost);
    if (fd && listens_at(static_cast<int>(*fd), place.port))
      options.listen_fd = static_cast<int>(*fd);
    if (place.listen_fd >= 0) options.listen_fd = place.listen_fd;
    took_socket = options.listen_fd.has_value();
  }
  survive_broken_connections();
  // Kept until the process exits: a rank that is ahead asks for the next world while this one is
  // still in the last.
  static std::optional<std::pair<std::optional<Digest>, Store>> kept;
  if (options.server && kept && kept->first != options.key) kept.reset();
  Store store = Store::connect(options);
  if (options.server) kept.emplace(options.key, store);
  return store;
}

std::string attempt(const Place& place) {
  static int worlds = 0;
  return fmt::format("lockstep/{}/{}", place.job, worlds++);
}

// Other launchers than ours do not divide a machine's cores among its ranks: each rank would start
// a thread for every core.
void share_cores(const std::vector<Member>& members, int rank) {
  std::vector<Cores> cores;
  for (const Member& member : members) cores.push_back(member.cores);
  if (!cores[rank].is_fixed) compute_with(fair_threads(cores));
  const std::string uneven = uneven_threads(cores);
  if (rank == 0 && !uneven.empty()) log::warn(uneven);
}

// The same where ranks do not tell each other: those that are bound to a part of the cores keep
// that part.
void share_cores_with_python(const Place& place) {
  Cores own = this_process_cores();
  if (own.is_fixed || own.ids.empty()) return;
  const bool is_bound = static_cast<int>(own.ids.size()) < sysconf(_SC_NPROCESSORS_ONLN);
  compute_with(fair_threads(std::vector<Cores>(is_bound ? 1 : place.local_size.value_or(1), own)));
}

// A rank that is alone: with more threads than its control groups allow, all of them are stopped
// for most of the time, and those that run wait for the others.
void keep_to_allowed_time() {
  const Cores own = this_process_cores();
  const int fair = fair_threads({own});
  if (!own.is_fixed && fair < own.threads) compute_with(fair);
}

// glibc gives the end of its heap back to the kernel once it is longer than twice the largest piece
// that it has ever had to map and was given back, 32 MiB of them at most (mallopt(3),
// M_MMAP_THRESHOLD). A training step frees and takes the same memory again and again; with such a
// piece at the start most of it stays. Thresholds that the user has set do not move.
void settle_malloc() {
#ifdef __GLIBC__
  constexpr size_t kLargest = (32 << 20) - (64 << 10);  // with glibc's own words below the limit
  void* volatile piece = std::malloc(kLargest);
  std::free(piece);
#endif
}

// "cores 0-3,8", where this process is bound to a part of them; empty where it may use all.
std::string own_cores() {
  const auto ids = this_process_cores().ids;
  if (ids.empty() || static_cast<int>(ids.size()) >= sysconf(_SC_NPROCESSORS_ONLN)) return "";
  return fmt::format("{} {}", ids.size() == 1 ? "core" : "cores", text_of_cores(ids));
}

}  // namespace

World World::solo() {
  open_standard_streams();
  return World(std::make_shared<State>());
}

World World::from_env(WorldOptions options) {
  open_standard_streams();
  flight::attach();
  raise_descriptor_limit();
  const Place place = place_from_env();
  settle_malloc();
  const Backend asked = backend_from_env(options.backend);
  if (const auto seconds = env_int("LOCKSTEP_TIMEOUT", 1, 7 * 24 * 3600))
    options.timeout = std::chrono::seconds(*seconds);
  options.timeout = checked_timeout("world", options.timeout);
  if (has_python_peers()) options.python_peers = true;
  if (options.python_peers && asked != Backend::Auto && asked != Backend::Gloo) {
    contradiction("Python ranks can join a group over gloo only: set LOCKSTEP_BACKEND=gloo");
  }
  const bool over_tcp = !options.python_peers &&
                        (asked == Backend::Tcp || (net_from_env() && asked != Backend::Gloo));
  Asked transport{.backend = options.python_peers ? Backend::Gloo : asked,
                  .over_tcp = over_tcp,
                  .tls = options.tls,
                  .timeout = options.timeout};
  if (place.size > 1 && !options.python_peers) {
    transport.secret = agreed_secret(place, options.timeout);
  }
  // One rank sends nothing, and is often started without a launcher.
  if (place.size == 1) env_int("LOCKSTEP_TLS", 0, 1);  // throws
  if (place.size > 1) transport.tls_key = tls_key_from_env(transport, place.job);
  const DeviceKind kind =
      check_device(device_from_env(options.device), asked, options.python_peers);
  log::set_rank(place.rank);
  if (place.size == 1) {
    keep_to_allowed_time();
    auto alone = std::make_shared<State>();
    alone->keys = own_keys(options.timeout);
    alone->device = device_at(find_devices(kind), {}, asked);
    take(alone->device);
    return World(std::move(alone));
  }

  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [start] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const auto state = not_for_children(std::make_shared<State>());
  state->rank = place.rank;
  state->size = place.size;
  const Store store = meet_at_store(place, options, transport);
  state->store = store;
  if (options.python_peers) {
    state->keys = keys_in(store.prefix("lockstep/user"), options.timeout);
    share_cores_with_python(place);
    state->local_rank = static_cast<int>(place.local_rank.value_or(0));
    state->local_size = static_cast<int>(place.local_size.value_or(1));
    state->group =
        Group(make_gloo_transport(python_group_keys(store), place.rank, place.size,
                                  {.timeout = options.timeout, .peers = GlooPeers::Python}));
    return World(state);
  }

  const Store own = store.prefix(attempt(place));
  state->keys = keys_in(own.prefix("user"), options.timeout);
  const Store::Making making(own, place.rank == 0 ? place.size : 0);
  const auto members =
      exchange_members(own, place.rank,
                       this_member(place.size, static_cast<int>(place.local_rank.value_or(-1)),
                                   find_devices(kind), shared_part(transport)),
                       options.timeout);
  log::info(
      fmt::format("the {} ranks have met at rank 0's store after {:.2f} s", place.size, seconds()));
  share_cores(members, place.rank);
  Connection connection = connect(own, place.rank, members, transport);
  end_serving(place);
  state->local_rank = connection.local_rank;
  state->local_size = connection.local_size;
  state->hosts = connection.hosts;
  state->is_encrypted = connection.is_encrypted;
  state->device = connection.device;
  state->group = std::move(connection.group);
  const World world(state);
  log::info(fmt::format("{}; connected after {:.2f} s", world.describe(), seconds()));
  return world;
}

int World::rank() const { return state_->rank; }
int World::size() const { return state_->size; }
int World::local_rank() const { return state_->local_rank; }
int World::local_size() const { return state_->local_size; }
at::Device World::device() const { return state_->device; }
const Group& World::group() const { return state_->group; }
const KeyValueStore& World::store() const { return state_->keys; }

std::ostream& World::main_out() const {
  thread_local std::ostream silent(nullptr);
  return is_main() ? std::cout : silent;
}

std::string World::describe() const {
  const auto count = [](int n, const char* noun) {
    return fmt::format("{} {}{}", n, noun, n == 1 ? "" : "s");
  };
  const std::string cores = own_cores();
  return fmt::format("{} on {}, {}{}, {} each{}", count(size(), "rank"),
                     count(state_->hosts, "host"), group().backend(),
                     state_->is_encrypted ? " with TLS" : "",
                     count(at::get_num_threads(), "thread"),
                     cores.empty() ? "" : fmt::format(", rank {} on {}", rank(), cores));
}

}  // namespace lockstep::comm
