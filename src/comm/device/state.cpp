#include "comm/device/state.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/device/capture.h"
#include "comm/device/memory.h"
#include "comm/health/call_numbers.h"
#include "comm/text.h"
#include "core/process/thread.h"
#include "core/time_limit.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// How often the watch looks at what is under way.
constexpr milliseconds kTick{10};
// And how long it goes on after the last one was over.
constexpr milliseconds kAwake{1000};
// How often a rank asks whether another has failed, once a call takes that long.
constexpr milliseconds kPeek{200};
// What a rank that ended without an error has sent may still be on its way through this one's
// device.
constexpr milliseconds kGrace{300};

}  // namespace

DeviceState::DeviceState(std::shared_ptr<DeviceComm> comm, const Store& store, const Setup& setup)
    : setup_(setup),
      store_(store),
      diagnosis_(setup.rank, setup.members, store.launcher_status()),
      peer_status_(store.clone(PeerStatus::kInquiry), setup.rank, setup.members),
      processes_(setup.pids),
      comm_(std::move(comm)),
      watch_(thread_without_signals([this] { watch(); })) {
  const Notice notice{.lane = "start", .signature = "start", .text = "its start"};
  const auto start = begin(notice, {.timeout = setup.timeout});
  try {
    comm_->connect();
    start->over = true;
  } catch (const CommError& error) {
    fail(notice, fmt::format("failed ({})", error.what()));
  }
  try {
    check_alive();
  } catch (...) {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    watch_.join();
    throw;
  }
}

DeviceState::~DeviceState() {
  const BesideCaptures beside;
  bool clean = false;
  try {
    finish_awaited();
    const Calls calls = under_way();
    clean = !ended_ && std::all_of(calls.begin(), calls.end(),
                                   [&](const auto& call) { return is_done(*call); });
  } catch (const std::exception&) {
    // The device has failed.
  }
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  watch_.join();
  if (clean) comm_->close();
  comm_->abort();
  // The memory of calls goes with this.
  if (!clean) comm_->drain();
}

// The program has been told that these are over, and the other ranks need this one's part of them.
// The deadline ends it.
void DeviceState::finish_awaited() {
  for (const auto& call : under_way()) {
    if (!call->awaited) continue;
    while (!ended_ && !(call->recorded && call->end.query())) {
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
}

std::shared_ptr<DeviceCall> DeviceState::begin(Notice notice, Request request) {
  check_alive();
  const milliseconds timeout = request.timeout;
  auto call = std::make_shared<DeviceCall>(setup_.device.type(), std::move(notice), timeout);
  call->request = std::move(request);
  bool wakes = false;
  {
    const std::lock_guard lock(mutex_);
    calls_.push_back(call);
    wakes = is_asleep_;
  }
  if (wakes) changed_.notify_all();
  return call;
}

std::shared_ptr<DeviceCall> DeviceState::begin_captured(Notice notice, Request request) {
  check_alive();
  const milliseconds timeout = request.timeout;
  auto call = std::make_shared<DeviceCall>(setup_.device.type(), std::move(notice), timeout);
  {
    const std::lock_guard lock(mutex_);
    // Without the request, whose memory is the graph's.
    captured_.push_back(std::make_shared<DeviceCall>(setup_.device.type(), call->notice, timeout));
    call->captured = static_cast<uint32_t>(captured_.size());
  }
  changed_.notify_all();
  call->request = std::move(request);
  return call;
}

void DeviceState::enqueued(DeviceCall& call, const c10::Stream& stream) {
  call.end.record(stream);
  call.recorded = true;
}

void DeviceState::wait(DeviceCall& call) {
  check_alive();
  call.awaited = true;
  const c10::impl::VirtualGuardImpl device(setup_.device.type());
  const c10::Stream current = device.getStream(setup_.device);
  call.end.block(current);
  if (call.captured == 0) let_go(call, current);
}

// As `stream` waits for the call's end, the allocator may have the memory once the stream is there.
// Else a host that is ahead of the device would keep what all of its calls have used.
void DeviceState::let_go(DeviceCall& call, const c10::Stream& stream) {
  // Another thread may sweep.
  std::unique_lock lock(mutex_);
  auto request = std::exchange(call.request, std::nullopt);
  lock.unlock();
  if (!request) return;
  const c10::impl::VirtualGuardImpl device(setup_.device.type());
  const auto known = c10::GetAllocator(setup_.device.type())->raw_deleter();
  bool knows_all = known != nullptr;
  for (const auto* tensors : {&request->inputs, &request->outputs}) {
    for (const at::Tensor& tensor : *tensors) {
      const c10::DataPtr& data = tensor.storage().data_ptr();
      if (data.get() == nullptr) continue;
      if (data.get_deleter() == known) {
        device.recordDataPtrOnStream(data, stream);
      } else {
        knows_all = false;  // a group's own memory, or the program's: kept until the call is over
      }
    }
  }
  if (knows_all) return;
  lock.lock();
  call.request = std::move(request);
}

bool DeviceState::is_done(const DeviceCall& call) const {
  if (call.replay) return comm_->replayed() != call.replay;
  const BesideCaptures beside;
  return call.recorded && call.end.query();
}

bool DeviceState::is_over(const DeviceCall& call) const {
  return ended_ || call.over || is_done(call);
}

void DeviceState::drain() {
  const BesideCaptures beside;
  for (const auto& call : under_way()) {
    if (call->recorded) call->end.synchronize();
    while (call->replay && !is_over(*call)) std::this_thread::sleep_for(milliseconds(1));
  }
  check_alive();
}

// Released outside the lock: the last reference frees memory of the group.
void DeviceState::sweep() {
  Calls kept, done;
  std::vector<std::optional<Request>> requests;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& call : calls_) {
      // What the watch thread has reported of it to the others has to be withdrawn when it is over.
      const bool is_over = call->over || (!call->looked && is_done(*call));
      (is_over ? done : kept).push_back(call);
    }
    calls_ = std::move(kept);
    for (const auto& call : done) requests.push_back(std::exchange(call->request, std::nullopt));
  }
  requests.clear();
  release_put_off();
}

DeviceState::Calls DeviceState::under_way() {
  const std::lock_guard lock(mutex_);
  Calls calls;
  for (const auto& call : calls_) {
    if (!call->over) calls.push_back(call);
  }
  return calls;
}

bool DeviceState::is_idle() {
  const Calls calls = under_way();
  return std::all_of(calls.begin(), calls.end(), [&](const auto& call) { return is_over(*call); });
}

// A launched graph tells the host nothing, so the watch looks which captured call the device is in.
// The caller holds the mutex.
void DeviceState::add_replay() {
  if (captured_.empty()) return;
  std::erase_if(calls_, [](const auto& call) { return call->replay && call->over; });
  const auto now = comm_->replayed();
  if (!now || std::any_of(calls_.begin(), calls_.end(),
                          [&](const auto& call) { return call->replay == now; }))
    return;
  const DeviceCall& captured = *captured_[now->number - 1];
  Notice notice = captured.notice;
  // Ranks that are in the same launch of a collective have counted as many before it. Messages are
  // not counted, so no other rank's notice is compared with theirs.
  const bool is_message = notice.lane != CallNumbers::kCollectives;
  notice.number = is_message ? 0 : now->collectives;
  notice.lane = is_message ? fmt::format("graphs of rank {}", setup_.rank) : "graphs";
  calls_.push_back(
      std::make_shared<DeviceCall>(setup_.device.type(), std::move(notice), captured.timeout));
  calls_.back()->replay = now;
}

void DeviceState::watch() {
  // Or CUDA would make a context on device 0 for this thread.
  c10::impl::VirtualGuardImpl(setup_.device.type()).setDevice(setup_.device);
  const BesideCaptures beside;
  std::unique_lock lock(mutex_);
  while (!closing_ && !ended_) {
    add_replay();
    const bool busy =
        std::any_of(calls_.begin(), calls_.end(), [](const auto& call) { return !call->over; });
    const auto now = steady_clock::now();
    const auto stopped = standstill(now - std::exchange(last_turn_, now), kTick);
    for (const auto& call : calls_) call->start = std::min(call->start + stopped, now);
    if (busy) last_busy_ = now;
    if (!busy) {
      // To be woken costs a call more than to be looked at some time.
      is_asleep_ = captured_.empty() && now - last_busy_ > kAwake;
      is_asleep_ ? changed_.wait(lock) : void(changed_.wait_for(lock, kTick));
      is_asleep_ = false;
      last_turn_ = steady_clock::now();
      // A call may have begun, and this process been stopped, before this thread was awake.
      for (const auto& call : calls_) {
        if (!call->over) last_turn_ = std::min(last_turn_, call->start);
      }
      continue;
    }
    const Calls calls = calls_;
    lock.unlock();
    try {
      examine(calls, now);
    } catch (const std::exception& error) {
      // Every question is answered like that once a kernel has failed.
      const auto first =
          std::find_if(calls.begin(), calls.end(), [](const auto& call) { return !call->over; });
      fail((first == calls.end() ? calls.front() : *first)->notice,
           fmt::format("failed: the device has failed ({})", first_line(error)));
    }
    lock.lock();
    if (!closing_ && !ended_) changed_.wait_for(lock, kTick);
  }
}

void DeviceState::examine(const Calls& calls, steady_clock::time_point now) {
  DeviceCall* first = nullptr;
  for (const auto& call : calls) {
    if (call->over) continue;
    if (!is_done(*call)) {
      if (first == nullptr) first = call.get();
      continue;
    }
    if (call->looked) {
      Notice notice = call->notice;
      notice.state = Notice::State::Running;
      peer_status_.post(notice);
    }
    call->over = true;
  }
  if (first == nullptr) return;
  const bool late =
      now - first->start > PeerStatus::kLongWait && now - last_look_ > PeerStatus::kLongWait;
  if (late || (now - first->start > kPeek && now - last_peek_ > kPeek && peek(now))) {
    look(*first);
    if (ended_) return;
  }
  if (const auto reason = ended_otherwise()) {
    // A rank may have done its part and ended since it was looked at.
    if (!is_done(*first)) fail(first->notice, *reason);
    return;
  }
  for (const auto& call : calls) {
    if (call->over || now - call->start < call->timeout) continue;
    return fail(call->notice, fmt::format("timed out after {}", text_of(call->timeout)));
  }
}

bool DeviceState::peek(steady_clock::time_point now) {
  last_peek_ = now;
  return peer_status_.peek().has_value();
}

// What ends the group in any call.
std::optional<std::string> DeviceState::ended_otherwise() {
  if (const auto error = comm_->async_error()) return fmt::format("failed ({})", *error);
  if (diagnosis_.launcher_reports()) return diagnosis_.abort_text();
  const auto lost = processes_.lost(kGrace);
  if (!lost) return std::nullopt;
  const auto fate = diagnosis_.fate(*lost);
  return fate ? fmt::format("lost {}, which {}", diagnosis_.name(*lost), *fate)
              : fmt::format("lost {}: its process {} has ended", diagnosis_.name(*lost),
                            setup_.pids[*lost]);
}

// Devices neither notice different calls, which wait for each other, nor tell one rank that another
// has aborted.
void DeviceState::look(DeviceCall& call) {
  last_look_ = steady_clock::now();
  call.looked = true;
  const PeerStatus::Notices notices = peer_status_.exchange(call.notice, milliseconds(0));
  for (int peer = 0; peer < diagnosis_.size(); ++peer) {
    const auto& notice = notices[peer];
    if (!notice) continue;
    if (notice->contradicts(call.notice)) return fail(call.notice, "is not what the others called");
    if (notice->state != Notice::State::Failed) continue;
    return fail(call.notice, fmt::format("was aborted on {}, whose {} {}", diagnosis_.name(peer),
                                         notice->text, notice->reason));
  }
}

bool DeviceState::claim_end() {
  const std::lock_guard lock(mutex_);
  return !ended_.exchange(true);
}

void DeviceState::publish_end(std::string text) {
  {
    const std::lock_guard lock(mutex_);
    dead_ = std::move(text);
  }
  changed_.notify_all();
}

void DeviceState::fail(const Notice& at, const std::string& reason) {
  if (!claim_end()) return;
  Notice notice = at;
  notice.state = Notice::State::Failed;
  notice.reason = reason;
  peer_status_.post(notice);
  comm_->abort();
  const PeerStatus::Notices notices = peer_status_.exchange(notice, PeerStatus::kInquiry);
  publish_end(diagnosis_.end(at, reason, notices));
}

void DeviceState::abort_all(std::string_view why) noexcept {
  if (!claim_end()) return;
  std::string reason(why);
  try {
    // Report it, and leave the others time to read it, before this process ends, as it may.
    peer_status_.exchange(
        {.state = Notice::State::Failed, .lane = "all", .text = Notice::kEnd, .reason = reason},
        PeerStatus::kInquiry);
  } catch (const std::exception&) {
    // The others learn of it by the deadline.
  }
  comm_->abort();
  publish_end(std::move(reason));
}

std::optional<std::string> DeviceState::failure() {
  if (!ended_) {
    if (const auto error = comm_->async_error()) return fmt::format("{} says: {}", name(), *error);
    if (diagnosis_.launcher_reports()) return "the job " + diagnosis_.abort_text();
    return std::nullopt;
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return dead_.has_value(); });
  return dead_;
}

void DeviceState::check_alive() {
  if (!ended_) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return dead_.has_value(); });
  const bool first = !std::exchange(told_, true);
  throw CommError(fmt::format("[{}] {}{}", name(),
                              first ? "" : "this group has failed, make a new one; it ended when ",
                              *dead_));
}

}  // namespace lockstep::comm
