#include "comm/world/rendezvous.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <optional>
#include <sstream>

#include "comm/shm/door.h"
#include "core/hash/mix.h"
#include "core/version.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using std::chrono::milliseconds;

std::string encode(const Member& member) {
  const Devices& devices = member.devices;
  return fmt::format("{} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {}", member.world_size,
                     member.local_rank, member.host, member.version, member.backend, member.net,
                     member.tls.empty() ? "-" : member.tls, static_cast<int>(devices.type),
                     devices.count, devices.is_own ? 1 : 0, member.cores.threads,
                     member.cores.is_fixed ? 1 : 0, member.cores.allowed,
                     member.cores.ids.empty() ? "-" : text_of_cores(member.cores.ids),
                     member.door.empty() ? "-" : member.door, devices.problem);
}

Member decode(const std::string& text, int rank) {
  Member member;
  std::istringstream in(text);
  int type = 0;
  std::string cores;
  if (!(in >> member.world_size >> member.local_rank >> member.host >> member.version >>
        member.backend >> member.net >> member.tls >> type >> member.devices.count >>
        member.devices.is_own >> member.cores.threads >> member.cores.is_fixed >>
        member.cores.allowed >> cores >> member.door)) {
    throw CommError(fmt::format(
        "[comm] rank {} introduced itself with '{}': is it another version of this library?", rank,
        text.substr(0, 80)));
  }
  member.devices.type = static_cast<c10::DeviceType>(type);
  const size_t machine = member.host.find('/');
  member.cores.machine = member.host.substr(0, machine);
  member.cores.container = member.host.substr(0, member.host.find('/', machine + 1));
  if (member.door == "-") member.door.clear();
  if (member.tls == "-") member.tls.clear();
  if (cores != "-") member.cores.ids = cores_of_text(cores);
  std::getline(in >> std::ws, member.devices.problem);
  return member;
}

// Where this process may share memory: one kernel, one process table, one name of the host; and,
// where LOCKSTEP_HOST says a name, only with ranks that say the same.
std::string host_key() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char name[64] = {};
  const ssize_t length = readlink("/proc/self/ns/pid", name, sizeof name - 1);
  const std::string own = length > 0 ? std::string(name, length) : "?";
  std::string said = env_text("LOCKSTEP_HOST").value_or("");
  std::replace_if(
      said.begin(), said.end(), [](unsigned char c) { return std::isspace(c); }, '_');
  // Machines that were cloned while they ran have one boot id.
  utsname system{};
  uname(&system);
  return fmt::format("{}/{}/{}/{}", boot, own, system.nodename, said);
}

void check_agrees(const Member& mine, int rank, const Member& theirs, int peer) {
  if (mine.world_size != theirs.world_size) {
    throw ConfigError(
        fmt::format("[comm] rank {} has WORLD_SIZE={}, rank {} has WORLD_SIZE={}: start all ranks "
                    "of a job with the same",
                    rank, mine.world_size, peer, theirs.world_size));
  }
  if (mine.version != theirs.version) {
    throw ConfigError(
        fmt::format("[comm] rank {} runs lockstep {}, rank {} runs {}: all ranks need the same",
                    rank, mine.version, peer, theirs.version));
  }
  const bool has_tls = !mine.tls.empty(), have_tls = !theirs.tls.empty();
  if (mine.backend != theirs.backend || mine.net != theirs.net || has_tls != have_tls) {
    throw ConfigError(fmt::format(
        "[comm] rank {} asks for LOCKSTEP_BACKEND={}, LOCKSTEP_NET={} and LOCKSTEP_TLS={:d}, rank "
        "{} asks for LOCKSTEP_BACKEND={}, LOCKSTEP_NET={} and LOCKSTEP_TLS={:d}: start all ranks "
        "of a job with the same",
        rank, mine.backend, mine.net, has_tls, peer, theirs.backend, theirs.net, have_tls));
  }
  if (mine.tls != theirs.tls) {
    throw ConfigError(
        fmt::format("[comm] ranks {} and {} encrypt by different secrets: give all ranks of a job "
                    "the same LOCKSTEP_TOKEN_FILE or LOCKSTEP_TOKEN, or leave it to `lockstep run`",
                    rank, peer));
  }
}

}  // namespace

Member this_member(int world_size, int local_rank, Devices devices, const AskedTransport& asked) {
  return {.world_size = world_size,
          .local_rank = local_rank,
          .host = host_key(),
          .version = std::string(version()),
          .devices = std::move(devices),
          .cores = this_process_cores(),
          .backend = asked.backend,
          .net = asked.net,
          .tls = asked.tls,
          .door = Door::own().address()};
}

namespace {

// A list to which every rank adds itself, how many have, and, once all have or two disagree, that
// it is over: a rank makes the same few requests for any number of ranks.
constexpr const char* kList = "members";
constexpr const char* kCome = "members/come";
constexpr const char* kFirst = "members/first";
constexpr const char* kOver = "members/over";

std::string line_of(int rank, const Member& member) {
  return fmt::format("{} {}\n", rank, encode(member));
}

// The members that have arrived. Throws ConfigError when one of them disagrees with this rank.
std::vector<std::optional<Member>> members_of(const std::string& list, int rank,
                                              const Member& mine) {
  std::vector<std::optional<Member>> members(mine.world_size);
  std::istringstream lines(list);
  for (std::string line; std::getline(lines, line);) {
    const int peer = std::stoi(line);
    Member member = decode(line.substr(line.find(' ') + 1), peer);
    check_agrees(mine, rank, member, peer);
    members.at(peer) = std::move(member);
  }
  return members;
}

[[noreturn]] void throw_missing(const Store& store, int rank, const Member& mine,
                                milliseconds timeout) {
  const LauncherStatus& launcher_status = *store.launcher_status();
  const bool failed = launcher_status.has_reported();
  const auto members = members_of(store.get(kList, milliseconds(1000)), rank, mine);
  std::vector<int> absent;
  for (int peer = 0; peer < mine.world_size; ++peer) {
    if (!members[peer]) absent.push_back(peer);
  }
  if (rank == 0) store.announce(-static_cast<int64_t>(absent.size()));
  throw CommError(fmt::format(
      "[comm] rank {} met {} of {} ranks at {} {}; missing: {}. Were they started, with the same "
      "MASTER_ADDR and "
      "MASTER_PORT?",
      rank, mine.world_size - static_cast<int>(absent.size()), mine.world_size, store.address(),
      failed ? "when the job " + launcher_status.abort_text_with_ends()
             : fmt::format("in {} s", timeout.count() / 1000.0),
      fmt::join(absent, ", ")));
}

}  // namespace

std::vector<Member> exchange_members(const Store& store, int rank, const Member& mine,
                                     milliseconds timeout) {
  // A number of this process, which a second one that adds its own recognises as its own.
  const auto process =
      static_cast<int64_t>(fnv1a<uint64_t>(fmt::format("{} {}", mine.host, ::getpid())) >> 24 | 1);
  if (const int64_t sum = store.add(fmt::format("taken/{}", rank), process); sum != process) {
    if (sum != 2 * process) {
      throw ConfigError(
          fmt::format("[comm] two processes have RANK={}: each rank of a job needs its own", rank));
    }
    throw ConfigError(fmt::format(
        "[comm] rank {} has joined already, in this process: there are two copies of Lockstep in "
        "it, as where a plug-in or a Python module has one of its own. Link all of them with the "
        "same shared library",
        rank));
  }
  const std::string own = line_of(rank, mine);
  const auto more = store.for_c10d();
  more->append(kList, {own.begin(), own.end()});
  const int64_t come = store.add(kCome, 1);
  if (come == 1) {
    store.set(kFirst, own);
  } else {
    const std::string first = store.get(kFirst, timeout);
    try {
      check_agrees(mine, rank, decode(first.substr(first.find(' ') + 1), std::stoi(first)),
                   std::stoi(first));
    } catch (const ConfigError& error) {
      // Ends it for all that have come and all that will.
      store.set(kOver, error.what());
      throw;
    }
  }
  if (come == mine.world_size) store.set(kOver, "");
  try {
    store.wait({kOver}, timeout);
  } catch (const CommError&) {
    throw_missing(store, rank, mine, timeout);
  }
  const std::string problem = store.get(kOver, timeout);
  if (!problem.empty()) throw ConfigError(problem);
  std::vector<Member> members;
  for (auto& member : members_of(store.get(kList, timeout), rank, mine))
    members.push_back(std::move(member.value()));
  return members;
}

}  // namespace lockstep::comm
