#include "launch/diagnosis/doctor.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>

#include "core/network/address.h"
#include "core/process/cgroup.h"
#include "launch/process/binding.h"
#include "launch/rendezvous/host.h"
#include "launch/rendezvous/network/listening_socket.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

using Findings = std::vector<Finding>;

constexpr int64_t kMiB = 1 << 20;
constexpr rlim_t kFewFiles = 4096;  // a rank needs some tens, and the launcher three for each rank
constexpr rlim_t kFewProcesses = 2048;   // libtorch starts several threads a rank
constexpr int64_t kSegment = 64 * kMiB;  // the buckets of a small model on two ranks

template <class... Args>
void good(Findings& findings, fmt::format_string<Args...> text, Args&&... args) {
  findings.push_back({Finding::Good, fmt::format(text, std::forward<Args>(args)...), ""});
}

std::optional<int64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (!(file >> value)) return std::nullopt;
  return value;
}

std::string first_word(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

void look_at_cores(Findings& findings) {
  const auto usable = usable_cores();
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  int nodes = 1;
  for (const Core& core : usable) nodes = std::max(nodes, core.node + 1);
  good(findings, "cores: {} of {} usable, {} NUMA node{}", cores(), online, nodes,
       nodes == 1 ? "" : "s");
  if (const auto allowed = group_cores(); allowed && *allowed < cores()) {
    findings.push_back({Finding::Warning,
                        fmt::format("the cgroup allows {:.1f} cores' time, fewer than the {} "
                                    "usable cores",
                                    *allowed, cores()),
                        "give --nproc-per-node by hand: cpu counts cores, and ranks that are "
                        "throttled wait for each other"});
  }
  if (const auto threads = env_text("OMP_NUM_THREADS")) {
    findings.push_back({Finding::Warning, fmt::format("OMP_NUM_THREADS={} is set", *threads),
                        "unset it, and each rank gets its share of the cores"});
  }
}

void look_at_memory(Findings& findings) {
  std::ifstream info("/proc/meminfo");
  std::string key;
  int64_t kib = 0;
  for (std::string line; info >> key >> kib && std::getline(info, line);) {
    if (key == "MemAvailable:") good(findings, "memory: {} MiB available", kib / 1024);
  }
  if (const auto limit = number_in("/sys/fs/cgroup/memory.max")) {
    good(findings, "memory of the cgroup: {} MiB", *limit / kMiB);
  }
  // Shared memory is anonymous: it is bound by memory and limits, not by the size of /dev/shm.
  const int fd = memfd_create("lockstep-doctor", MFD_CLOEXEC);
  const bool is_sized = fd >= 0 && ftruncate(fd, kSegment) == 0;
  const int error = is_sized ? posix_fallocate(fd, 0, kSegment) : errno;  // sets no errno
  if (error == 0) {
    good(findings, "shared memory: {} MiB can be had", kSegment / kMiB);
  } else {
    findings.push_back(
        {Finding::Problem,
         fmt::format("no {} MiB of shared memory: {}", kSegment / kMiB, std::strerror(error)),
         "raise the memory limit of the container or cgroup, and ulimit -f; or run "
         "with LOCKSTEP_BACKEND=tcp"});
  }
  if (fd >= 0) close(fd);
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) == 0) {
    good(findings, "/dev/shm: {} MiB free (not needed by shm; Python peers and NCCL use it)",
         static_cast<int64_t>(shm.f_bavail) * static_cast<int64_t>(shm.f_frsize) / kMiB);
  }
}

void look_at_limit(Findings& findings, const char* what, int resource, rlim_t few, char letter) {
  rlimit limit{};
  getrlimit(static_cast<__rlimit_resource>(resource), &limit);
  if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= few) {
    if (limit.rlim_cur == RLIM_INFINITY) {
      good(findings, "{}: no limit", what);
    } else {
      good(findings, "{}: {}", what, limit.rlim_cur);
    }
    return;
  }
  findings.push_back({Finding::Warning, fmt::format("{}: {}", what, limit.rlim_cur),
                      fmt::format("many ranks need more: ulimit -{} {}", letter, few)});
}

// In digits; empty where no other program of a job would use it.
std::string address_of(const ifaddrs& one) {
  if (one.ifa_addr == nullptr) return "";
  const auto family = one.ifa_addr->sa_family;
  if (family != AF_INET && family != AF_INET6) return "";
  const Address address = Address::of(one.ifa_addr);
  return address.is_link_local() ? "" : address.host();
}

void look_at_network(Findings& findings) {
  try {
    good(findings, "ports: {} on 127.0.0.1 is free", listen_on_loopback(std::nullopt).port);
  } catch (const Error& error) {
    findings.push_back(
        {Finding::Problem, error.what(), "bring the loopback interface up: ip link set lo up"});
  }
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) == 0) {
    const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
    std::string names;
    for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
      // A port can be opened there all the same.
      if (one->ifa_addr != nullptr && one->ifa_addr->sa_family == AF_PACKET &&
          (one->ifa_flags & IFF_LOOPBACK) != 0 && (one->ifa_flags & IFF_UP) == 0) {
        findings.push_back({Finding::Problem,
                            fmt::format("the loopback interface, {}, is down", one->ifa_name),
                            fmt::format("bring it up: ip link set {} up", one->ifa_name)});
      }
      const std::string text = (one->ifa_flags & IFF_UP) == 0 ? "" : address_of(*one);
      if (text.empty()) continue;
      names += fmt::format("{}{} {}", names.empty() ? "" : ", ", one->ifa_name, text);
    }
    good(findings, "interfaces: {}", names);
  }
  const std::string name = host_name();
  const auto own = resolve(name, 0).addresses;
  if (own.empty()) {
    findings.push_back({Finding::Warning,
                        fmt::format("the host's own name, {}, has no address", name),
                        "other programs (Python peers over Gloo) need it: add it to /etc/hosts"});
  } else if (own.front().is_loopback()) {
    findings.push_back(
        {Finding::Warning,
         fmt::format("the host's own name, {}, means this host only (127.x in /etc/hosts)", name),
         "for Python peers on other hosts set GLOO_SOCKET_IFNAME; Lockstep asks routes "
         "instead"});
  } else {
    good(findings, "name: {}", name);
  }
}

void look_at_clock(Findings& findings) {
  timex state{};
  const bool synchronised = adjtimex(&state) != TIME_ERROR;
  const std::string source =
      first_word("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  if (!source.empty() && source != "tsc" && source != "kvm-clock" && source != "arch_sys_counter") {
    findings.push_back({Finding::Warning, fmt::format("clock source: {}", source),
                        "reading the time is slow with it, which costs each collective; boot with "
                        "clocksource=tsc if "
                        "the machine has a steady one"});
  } else {
    good(findings, "clock: {}, {}", source.empty() ? "unknown source" : source,
         synchronised ? "synchronised" : "not synchronised (only the times in logs differ)");
  }
}

void look_at_library(Findings& findings, const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr) {
    good(findings, "library: {} and its libtorch load", library);
    return;
  }
  findings.push_back(
      {Finding::Problem, fmt::format("the library does not load: {}", dlerror()),
       "programs need it: set LD_LIBRARY_PATH to the folders of liblockstep.so and libtorch.so, or "
       "build with an RPATH"});
}

void look_at_gpus(Findings& findings) {
  try {
    good(findings, "GPUs: {}", count_ranks("gpu"));
  } catch (const ConfigError&) {
    good(findings, "GPUs: none visible");
  }
}

}  // namespace

std::vector<Finding> examine_host(const std::string& library) {
  Findings findings;
  look_at_cores(findings);
  look_at_memory(findings);
  look_at_limit(findings, "open files", RLIMIT_NOFILE, kFewFiles, 'n');
  look_at_limit(findings, "processes and threads", RLIMIT_NPROC, kFewProcesses, 'u');
  look_at_network(findings);
  look_at_clock(findings);
  look_at_gpus(findings);
  look_at_library(findings, library);
  return findings;
}

}  // namespace lockstep::launch
