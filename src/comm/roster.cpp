#include "comm/roster.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <sstream>
#include <thread>

#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kVersion = "0.1.0";

std::string key_of(int rank) { return fmt::format("member/{}", rank); }

std::string encode(const Member& member) {
  const Devices& devices = member.devices;
  return fmt::format("{} {} {} {} {} {} {} {} {} {} {}", member.world_size, member.local_rank, member.host, member.version,
                     static_cast<int>(devices.type), devices.count, devices.is_own ? 1 : 0, member.cores.threads,
                     member.cores.is_fixed ? 1 : 0, member.cores.ids.empty() ? "-" : text_of_cores(member.cores.ids),
                     devices.problem);
}

Member decode(const std::string& text, int rank) {
  Member member;
  std::istringstream in(text);
  int type = 0;
  std::string cores;
  if (!(in >> member.world_size >> member.local_rank >> member.host >> member.version >> type >> member.devices.count >>
        member.devices.is_own >> member.cores.threads >> member.cores.is_fixed >> cores)) {
    throw CommError(fmt::format("[comm] rank {} introduced itself with '{}': is it another version of this library?",
                                rank, text.substr(0, 80)));
  }
  member.devices.type = static_cast<c10::DeviceType>(type);
  member.cores.machine = member.host.substr(0, member.host.find('/'));
  if (cores != "-") member.cores.ids = cores_of_text(cores);
  std::getline(in >> std::ws, member.devices.problem);
  return member;
}

// Where this process may share memory: one kernel, one process table; and, where LOCKSTEP_HOST says a
// name, only with ranks that say the same.
std::string host_key() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char name[64] = {};
  const ssize_t length = readlink("/proc/self/ns/pid", name, sizeof name - 1);
  const std::string own = length > 0 ? std::string(name, length) : "?";
  std::string said = env_text("LOCKSTEP_HOST").value_or("");
  std::replace_if(said.begin(), said.end(), [](unsigned char c) { return std::isspace(c); }, '_');
  return fmt::format("{}/{}/{}", boot, own, said);
}

void check_agrees(const Member& mine, int rank, const Member& theirs, int peer) {
  if (mine.world_size != theirs.world_size) {
    throw ConfigError(fmt::format(
        "[comm] rank {} has WORLD_SIZE={}, rank {} has WORLD_SIZE={}: start all ranks of a job with the same", rank,
        mine.world_size, peer, theirs.world_size));
  }
  if (mine.version != theirs.version) {
    throw ConfigError(fmt::format("[comm] rank {} runs lockstep {}, rank {} runs {}: all ranks need the same", rank,
                                  mine.version, peer, theirs.version));
  }
}

}  // namespace

void leave(const Store& store, int rank, int others) noexcept {
  const auto start = Clock::now();
  // Who hears the launcher needs no store to know why.
  const auto limit = [&] { return store.verdict()->is_out() ? milliseconds(200) : milliseconds(2000); };
  try {
    int64_t left = store.add("left", rank == 0 ? 0 : 1);
    for (; rank == 0 && left < others && Clock::now() < start + limit();
         left = store.add("left", 0)) {
      std::this_thread::sleep_for(milliseconds(5));
    }
  } catch (const std::exception&) {
    // Rank 0 has left already.
  }
}

Member this_member(int world_size, int local_rank, Devices devices) {
  return {world_size, local_rank, host_key(), kVersion, std::move(devices), this_process_cores()};
}

std::vector<Member> exchange_members(const Store& store, int rank, const Member& mine, milliseconds timeout) {
  if (store.add(fmt::format("taken/{}", rank), 1) > 1) {
    throw ConfigError(fmt::format("[comm] two processes have RANK={}: each rank of a job needs its own", rank));
  }
  store.set(key_of(rank), encode(mine));
  std::vector<Member> members(mine.world_size);
  std::vector<bool> here(mine.world_size, false);
  const Verdict& verdict = *store.verdict();
  const auto deadline = Clock::now() + timeout;
  milliseconds nap(1);
  for (int missing = mine.world_size; missing > 0;) {
    const int before = missing;
    for (int peer = 0; peer < mine.world_size; ++peer) {
      if (here[peer] || !store.check({key_of(peer)})) continue;
      here[peer] = true;
      --missing;
      members[peer] = decode(store.get(key_of(peer), timeout), peer);
      try {
        check_agrees(mine, rank, members[peer], peer);
      } catch (const ConfigError&) {
        leave(store, rank, static_cast<int>(std::count(here.begin(), here.end(), true)) - (here[rank] ? 1 : 0));
        throw;
      }
    }
    if (missing == 0 || missing != before) continue;
    const bool failed = verdict.is_out();
    if (failed || Clock::now() >= deadline) {
      std::string absent;
      for (int peer = 0; peer < mine.world_size; ++peer) {
        if (!here[peer]) absent += fmt::format("{}{}", absent.empty() ? "" : ", ", peer);
      }
      throw CommError(fmt::format(
          "[comm] rank {} met {} of {} ranks at {} {}; missing: {}. Were they started, with the same MASTER_ADDR and "
          "MASTER_PORT?",
          rank, mine.world_size - missing, mine.world_size, store.address(),
          failed ? "when the job " + verdict.given_up_with_fates() : fmt::format("in {} s", timeout.count() / 1000.0), absent));
    }
    std::this_thread::sleep_for(nap);
    nap = std::min(nap * 2, milliseconds(20));
  }
  return members;
}

}  // namespace lockstep::comm
