#include "comm/world/sharing.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <sstream>
#include <vector>

#include "comm/shm/segment.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

constexpr int64_t kTrialBytes = 4096;
constexpr const char* kCannotShare = "sharing/problems";
constexpr const char* kHaveTried = "sharing/done";
constexpr const char* kAllTried = "sharing/over";

using Hosts = std::vector<std::vector<int>>;

// What the host's first rank tells the others: a handle, or nothing.
void offer_trial(const Store& store, const std::string& key, const std::vector<std::string>& doors,
                 Segment& page) {
  try {
    page = Segment::create(kTrialBytes, doors);
  } catch (const CommError&) {
    store.set(key, "");
    throw;
  }
  store.set(key, {reinterpret_cast<const char*>(&page.handle()), sizeof(SegmentHandle)});
}

void attach_trial(const std::string& text) {
  SegmentHandle handle;
  if (text.size() != sizeof handle) return;  // the rank that could not make it reports that
  std::memcpy(&handle, text.data(), sizeof handle);
  (void)Segment::attach(handle);
}

// Lines of "host problem", the hosts by number.
Sharing apart(Topology layout, const Hosts& hosts, const std::string& problems) {
  Sharing sharing{.layout = std::move(layout), .problem = {}};
  std::istringstream lines(problems);
  for (std::string line; std::getline(lines, line);) {
    const size_t host = std::stoul(line);
    if (host >= hosts.size()) continue;
    for (const int rank : hosts[host])
      sharing.layout.hosts[rank] = fmt::format("{}/alone/{}", sharing.layout.hosts[rank], rank);
    if (!sharing.problem.empty()) continue;
    sharing.problem = fmt::format("ranks {} of one host cannot share memory ({})",
                                  fmt::join(hosts[host], ", "), line.substr(line.find(' ') + 1));
  }
  return sharing;
}

}  // namespace

Sharing try_sharing(const Store& store, int rank, Topology layout,
                    std::chrono::milliseconds timeout) {
  const Hosts hosts = layout.by_host();
  int64_t trying = 0;
  size_t own = 0;
  for (size_t host = 0; host < hosts.size(); ++host) {
    if (hosts[host].size() > 1) trying += static_cast<int64_t>(hosts[host].size());
    if (std::find(hosts[host].begin(), hosts[host].end(), rank) != hosts[host].end()) own = host;
  }
  if (trying == 0) return {.layout = std::move(layout), .problem = {}};
  Segment page;  // stays until all have it
  if (hosts[own].size() > 1) {
    const std::string key = fmt::format("sharing/{}", own);
    std::optional<std::string> problem;
    try {
      if (rank == hosts[own].front()) {
        std::vector<std::string> doors;
        for (const int other : hosts[own])
          if (other != rank) doors.push_back(layout.doors[other]);
        offer_trial(store, key, doors, page);
      } else {
        const std::string text = store.get(key, timeout);
        try {
          attach_trial(text);
        } catch (const CommError& error) {
          problem = error.what();
        }
      }
    } catch (const CommError& error) {
      if (rank != hosts[own].front()) throw;
      problem = error.what();
    }
    if (problem) {
      std::replace(problem->begin(), problem->end(), '\n', ' ');
      const std::string line = fmt::format("{} {}\n", own, *problem);
      store.for_c10d()->append(kCannotShare, {line.begin(), line.end()});
    }
    if (store.add(kHaveTried, 1) == trying) {
      store.set(kAllTried,
                store.check({kCannotShare}) ? store.get(kCannotShare, timeout) : std::string());
    }
  }
  const std::string problems = store.get(kAllTried, timeout);
  return apart(std::move(layout), hosts, problems);
}

}  // namespace lockstep::comm
