#include "comm/gloo/state.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "comm/gloo/link.h"
#include "comm/host/interfaces.h"
#include "comm/later.h"
#include "comm/text.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// How long a wait in the store takes at most to end once the launcher has reported a failure.
constexpr milliseconds kHearing{250};

std::string address_key(int rank) { return fmt::format("lockstep/address/{}", rank); }

milliseconds left_of(milliseconds timeout, steady_clock::time_point start) {
  const auto spent = std::chrono::duration_cast<milliseconds>(steady_clock::now() - start);
  return std::max(milliseconds(0), timeout - spent);
}

std::vector<std::string> interfaces() {
  std::vector<std::string> names;
  std::string text = env_text("GLOO_SOCKET_IFNAME").value_or("");
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    if (comma > 0) names.push_back(text.substr(0, comma));
    text.erase(0, comma + 1);
  }
  return names;
}

}  // namespace

GlooState::GlooState(const Store& store, int rank, std::vector<int> members,
                     const GlooOptions& options)
    : GroupHealth("gloo", store, rank, std::move(members)),
      options_(options),
      address_(address_towards(store.host(), store.port()).value_or("127.0.0.1")) {
  if (options_.peers == GlooPeers::Lockstep) meet();
  connect();
  ops_ = std::make_unique<GlooOps>(group_, options_);
}

GlooState::~GlooState() = default;

// Waits until every rank has come, and settles by which address this one is reached.
void GlooState::meet() {
  const auto start = steady_clock::now();
  store().set(address_key(rank()), address_);
  std::vector<std::string> keys;
  for (int peer = 0; peer < size(); ++peer) keys.push_back(address_key(peer));
  for (bool all = false; !all;) {
    try {
      store().wait(keys,
                   std::max(milliseconds(1), std::min(kSlice, left_of(options_.timeout, start))));
      all = true;
    } catch (const CommError&) {
      all = store().check(keys);  // throws when the store is gone
    }
    const bool late = left_of(options_.timeout, start).count() == 0;
    if (all || (!late && !diagnosis().launcher_reports())) continue;
    std::vector<std::string> missing;
    for (int peer = 0; peer < size(); ++peer) {
      if (store().check({keys[peer]})) continue;
      const auto end = diagnosis().fate(peer);
      missing.push_back(end ? fmt::format("{} {}", diagnosis().name(peer), *end)
                            : diagnosis().name(peer));
    }
    throw CommError(
        fmt::format("[gloo] start: {} of {} ranks had not come to the store at {} {} after {} on "
                    "{}: {}; look at "
                    "their output, and whether every rank was started with the same MASTER_ADDR, "
                    "MASTER_PORT and "
                    "WORLD_SIZE",
                    missing.size(), size(), store().address(),
                    late ? "at the deadline" : "when the job " + diagnosis().abort_text(),
                    text_of(options_.timeout - left_of(options_.timeout, start)),
                    diagnosis().name(rank()), fmt::join(missing, ", ")));
  }
  if (!is_loopback(address_)) return;
  // The store is on this host, yet ranks of other hosts are not: use the address they know.
  for (const std::string& key : keys) {
    const std::string other = store().get(key, options_.timeout);
    if (is_loopback(other)) continue;
    address_ = address_towards(other, store().port()).value_or(address_);
    return;
  }
}

void GlooState::connect() {
  const auto start = steady_clock::now();
  std::string failure = "no answer";
  try {
    auto options = c10d::ProcessGroupGloo::Options::create(options_.timeout);
    for (const std::string& interface : interfaces()) {
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(interface));
    }
    if (options->devices.empty()) {
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address_));
    }
    // Gloo has a deadline of its own, but its connect cannot be cancelled when the launcher reports
    // a failure.
    Later group([store = store(), rank = rank(), size = size(), options] {
      return c10::make_intrusive<GlooGroup>(store.for_c10d(), rank, size, options);
    });
    const milliseconds limit = options_.timeout + std::chrono::seconds(1);
    while (!group.is_over(kSlice) && left_of(limit, start).count() > 0 &&
           !diagnosis().launcher_reports()) {
    }
    // A wait in the store ends at the launcher's report, too, and is to end before this process
    // does, since it writes to the log.
    if (group.is_over(kHearing)) group_ = group.get();
  } catch (const std::exception& error) {
    failure = first_line(error);
  }
  if (!group_) {
    if (diagnosis().launcher_reports()) {
      throw CommError(fmt::format("[gloo] start of {} of {} {}", diagnosis().name(rank()), size(),
                                  store().launcher_status()->abort_text_with_ends()));
    }
    throw CommError(fmt::format(
        "[gloo] start: {} of {}, at {}, could not connect to the others within {}: {}; set "
        "GLOO_SOCKET_IFNAME to the interface by which the hosts reach each other, and look at "
        "whether a firewall is between them",
        diagnosis().name(rank()), size(), address_, text_of(options_.timeout), failure));
  }
  if (options_.peers == GlooPeers::Python) return;
  // No rank continues, or exits and with it the store, before all have connected.
  WireOperation operation{.notice = {.lane = "start", .signature = "start", .text = "start"},
                          .timeout = options_.timeout};
  await(group_->barrier(), operation);
  done(operation);
}

GlooState::Place GlooState::add(Started call) {
  const std::lock_guard lock(mutex_);
  return started_.insert(started_.end(), std::move(call));
}

void GlooState::remove(Place call) {
  const std::lock_guard lock(mutex_);
  started_.erase(call);
}

std::optional<Notice> GlooState::first_under_way() const {
  const std::lock_guard lock(mutex_);
  for (const auto& call : started_) {
    if (!std::ranges::all_of(call.works, [](const auto& work) { return work->isCompleted(); }))
      return call.notice;
  }
  return std::nullopt;
}

bool GlooState::await(const WireWork& work, WireOperation& operation,
                      steady_clock::time_point until) {
  for (;;) {
    check_alive();
    const auto now = steady_clock::now();
    const auto limit = std::chrono::ceil<milliseconds>(
        std::min<steady_clock::duration>(until - now, std::min(kSlice, operation.left())));
    try {
      work->wait(std::max(milliseconds(1), limit));
      return true;
    } catch (const std::exception& error) {
      if (work->isCompleted()) {
        // It may have completed just after the wait timed out.
        if (const auto cause = work->exception()) {
          check_alive();
          fail(operation, fmt::format("failed ({})", first_line(error)));
        }
        return true;
      }
    }
    operation.excuse(steady_clock::now() - now, kSlice);
    attend(operation);
    if (steady_clock::now() >= until) return false;
  }
}

// Gloo closes all connections of a group when a receive times out, so this receives a message that
// no rank sends. From a rank whose connection is closed already a receive fails without closing the
// others, so it asks all.
void GlooState::close() noexcept {
  for (int step = 1; step < size(); ++step) {
    try {
      char nothing;
      GlooLink(group_, milliseconds(1))
          .recv((rank() + step) % size(), std::numeric_limits<int>::max(), &nothing, 1)
          ->wait();
    } catch (const std::exception&) {
      // The timeout is expected.
    }
  }
}

}  // namespace lockstep::comm
