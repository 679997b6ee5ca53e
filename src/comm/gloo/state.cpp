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

// How often a wait looks at the launcher's status.
constexpr milliseconds kSlice{50};
// What a wait in the store takes at most to end once there are any.
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
    : store_(store),
      diagnosis_(rank, std::move(members), store.launcher_status()),
      options_(options),
      peer_status_(store.clone(PeerStatus::kInquiry), rank, diagnosis_.members()),
      address_(address_towards(store.host(), store.port()).value_or("127.0.0.1")) {
  if (options_.peers == GlooPeers::Lockstep) meet();
  connect();
  ops_ = std::make_unique<GlooOps>(group_, options_);
}

GlooState::~GlooState() = default;

// Waits until every rank has come, and settles by which address this one is reached.
void GlooState::meet() {
  const auto start = steady_clock::now();
  store_.set(address_key(rank()), address_);
  std::vector<std::string> keys;
  for (int peer = 0; peer < size(); ++peer) keys.push_back(address_key(peer));
  for (bool all = false; !all;) {
    try {
      store_.wait(keys,
                  std::max(milliseconds(1), std::min(kSlice, left_of(options_.timeout, start))));
      all = true;
    } catch (const CommError&) {
      all = store_.check(keys);  // throws when the store is gone
    }
    const bool late = left_of(options_.timeout, start).count() == 0;
    if (all || (!late && !diagnosis_.launcher_reports())) continue;
    std::vector<std::string> missing;
    for (int peer = 0; peer < size(); ++peer) {
      if (store_.check({keys[peer]})) continue;
      const auto end = diagnosis_.fate(peer);
      missing.push_back(end ? fmt::format("{} {}", diagnosis_.name(peer), *end)
                            : diagnosis_.name(peer));
    }
    throw CommError(
        fmt::format("[gloo] start: {} of {} ranks had not come to the store at {} {} after {} on "
                    "{}: {}; look at "
                    "their output, and whether every rank was started with the same MASTER_ADDR, "
                    "MASTER_PORT and "
                    "WORLD_SIZE",
                    missing.size(), size(), store_.address(),
                    late ? "at the deadline" : "when the job " + diagnosis_.given_up(),
                    text_of(options_.timeout - left_of(options_.timeout, start)),
                    diagnosis_.name(rank()), fmt::join(missing, ", ")));
  }
  if (!is_loopback(address_)) return;
  // The store is on this host, yet ranks of other hosts are not: use the address they know.
  for (const std::string& key : keys) {
    const std::string other = store_.get(key, options_.timeout);
    if (is_loopback(other)) continue;
    address_ = address_towards(other, store_.port()).value_or(address_);
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
    // Gloo has a deadline of its own, but does not look at what the launcher reports.
    Later group([store = store_, rank = rank(), size = size(), options] {
      return c10::make_intrusive<GlooGroup>(store.for_c10d(), rank, size, options);
    });
    const milliseconds limit = options_.timeout + std::chrono::seconds(1);
    while (!group.is_over(kSlice) && left_of(limit, start).count() > 0 &&
           !diagnosis_.launcher_reports()) {
    }
    // A wait in the store ends at the launcher's report, too, and is to end before this process
    // does, since it writes to the log.
    if (group.is_over(kHearing)) group_ = group.get();
  } catch (const std::exception& error) {
    failure = first_line(error);
  }
  if (!group_) {
    if (diagnosis_.launcher_reports()) {
      throw CommError(fmt::format("[gloo] start of {} of {} {}", diagnosis_.name(rank()), size(),
                                  store_.launcher_status()->given_up_with_fates()));
    }
    throw CommError(fmt::format(
        "[gloo] start: {} of {}, at {}, could not connect to the others within {}: {}; set "
        "GLOO_SOCKET_IFNAME to the interface by which the hosts reach each other, and look at "
        "whether a firewall is between them",
        diagnosis_.name(rank()), size(), address_, text_of(options_.timeout), failure));
  }
  if (options_.peers == GlooPeers::Python) return;
  // Nobody goes on, or ends and takes the store along, before all have connected.
  GlooStep step{.notice = {.lane = "start", .signature = "start", .text = "start"},
                .timeout = options_.timeout};
  await(group_->barrier(), step);
  done(step);
}

bool GlooState::await(const WireWork& work, GlooStep& step, steady_clock::time_point until) {
  for (;;) {
    check_alive();
    const milliseconds left = left_of(step.timeout, step.start);
    const auto limit = std::chrono::ceil<milliseconds>(
        std::min<steady_clock::duration>(until - steady_clock::now(), std::min(kSlice, left)));
    try {
      work->wait(std::max(milliseconds(1), limit));
      return true;
    } catch (const std::exception& error) {
      if (work->isCompleted()) {
        // It may have come to its end just after the wait gave up.
        if (const auto cause = work->exception()) {
          check_alive();
          fail(step, fmt::format("failed ({})", first_line(error)));
        }
        return true;
      }
    }
    if (diagnosis_.launcher_reports()) fail(step, diagnosis_.given_up());
    if (left.count() == 0) fail(step, fmt::format("timed out after {}", text_of(step.timeout)));
    if (!step.looked && steady_clock::now() - step.start > PeerStatus::kLongWait) look(step);
    if (steady_clock::now() >= until) return false;
  }
}

// Ranks that wait long compare what they wait for, since different calls would wait for each other
// until the deadline.
void GlooState::look(GlooStep& step) {
  step.looked = true;
  const PeerStatus::Notices notices = peer_status_.exchange(step.notice, milliseconds(0));
  for (const auto& notice : notices) {
    if (notice && notice->contradicts(step.notice)) fail(step, "is not what the others called");
  }
}

void GlooState::done(const GlooStep& step) {
  if (!step.looked) return;
  Notice notice = step.notice;
  notice.state = Notice::State::Running;
  peer_status_.post(notice);
}

void GlooState::fail(const GlooStep& step, const std::string& reason) {
  Notice notice = step.notice;
  notice.state = Notice::State::Failed;
  notice.reason = reason;
  if (!end_.say(fmt::format("{} {}", notice.text, reason))) check_alive();
  peer_status_.post(notice);
  break_connections();
  const PeerStatus::Notices notices = peer_status_.exchange(notice, PeerStatus::kInquiry);
  const std::string end = diagnosis_.end(step.notice, reason, notices);
  end_.explain(end);
  throw CommError("[gloo] " + end);
}

void GlooState::give_up(std::string_view why) noexcept {
  const std::string reason(why);
  if (!end_.say(reason)) return;
  try {
    // Said before the connections break and, it may be, this process ends.
    peer_status_.exchange(
        {.state = Notice::State::Failed, .lane = "all", .text = Notice::kEnd, .reason = reason},
        milliseconds(0));
  } catch (const std::exception&) {
    // The others learn of it by the connections alone.
  }
  break_connections();
}

void GlooState::abandon() noexcept {
  if (end_.say("it was destroyed")) break_connections();
}

void GlooState::check_alive() const {
  const auto why = end_.why();
  if (!why) return;
  throw CommError("[gloo] this group is dead, make a new one; it ended when " + *why);
}

std::optional<std::string> GlooState::failure() {
  if (const auto why = end_.why()) return why;
  if (diagnosis_.launcher_reports()) return "the job " + diagnosis_.given_up();
  // Python ranks post nothing.
  if (options_.peers == GlooPeers::Lockstep && peer_status_.peek())
    return "another rank has given it up";
  return std::nullopt;
}

// Ends all that is under way, here and on every rank that is connected to this one: a message that
// nobody sends and that nobody waits for is Gloo's way to close all connections of a group.
void GlooState::break_connections() noexcept {
  try {
    char nothing;
    GlooLink(group_, milliseconds(1))
        .recv((rank() + 1) % size(), std::numeric_limits<int>::max(), &nothing, 1)
        ->wait();
  } catch (const std::exception&) {
    // That is how it ends.
  }
}

}  // namespace lockstep::comm
