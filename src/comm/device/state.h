// What a transport for devices and its operations share: the communicator, what is under way on it,
// and how a failure becomes an error on every rank.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/device/comm.h"
#include "comm/health/diagnosis.h"
#include "comm/health/peer_status.h"
#include "comm/host/processes.h"
#include "comm/transport.h"

namespace lockstep::comm {

// A call that was enqueued on the device, or captured in a CUDA graph, or a captured one that the
// device is in, because the graph was launched.
struct DeviceCall {
  DeviceCall(c10::DeviceType type, Notice the_notice, std::chrono::milliseconds the_timeout)
      : notice(std::move(the_notice)), timeout(the_timeout), end(type) {}

  const Notice notice;
  const std::chrono::milliseconds timeout;
  // Later by the time for which this process was stopped; the watch thread's own.
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  // Keeps the memory until the device is done with it, or until the allocator knows of that.
  std::optional<Request> request;
  int64_t largest = 0;    // bytes from one rank to another, where each has sizes of its own
  uint32_t captured = 0;  // its number among those in graphs, from 1
  std::optional<ReplayedCall> replay;  // what the communicator says as long as the device is in it
  std::shared_ptr<void> list;          // of messages, which the device reads
  c10::Event end;
  bool awaited = false;               // by the program, which may go on before the device does
  std::atomic<bool> looked{false};    // the watch thread has posted it to the others
  std::atomic<bool> recorded{false};  // `end` is in the stream
  std::atomic<bool> over{false};
};

class DeviceState {
 public:
  struct Setup {
    at::Device device;
    std::vector<int> members;  // the world's numbers of the group's ranks
    int rank = 0;
    std::chrono::milliseconds timeout;
    std::vector<int> pids;  // of the ranks on this host; 0 for the others
  };

  // Connects `comm`, which this ends. Throws CommError.
  DeviceState(std::shared_ptr<DeviceComm> comm, const Store& store, const Setup& setup);
  // Lets the device finish calls that were waited for; others are aborted.
  ~DeviceState();

  // Registers a call, which is watched from here on; all on the one thread that calls the group.
  std::shared_ptr<DeviceCall> begin(Notice notice, Request request);
  // The same for one that a CUDA graph captures, which is watched whenever the graph is launched.
  std::shared_ptr<DeviceCall> begin_captured(Notice notice, Request request);
  // After its last step was put into the stream.
  void enqueued(DeviceCall& call, const c10::Stream& stream);
  // Makes the caller's current stream wait for it, and lets go of memory of libtorch's allocator,
  // which gives it away again after that. Throws CommError when the group has failed.
  void wait(DeviceCall& call);
  bool is_over(const DeviceCall& call) const;
  // Blocks the caller until the device has done everything that was enqueued.
  void drain();
  // Whether the device has done everything that was enqueued.
  bool is_idle();
  // Releases the memory of calls that are over.
  void sweep();

  // Ends the group: waiting and later calls throw. Any thread.
  void fail(const Notice& at, const std::string& reason);
  void abort_all(std::string_view why) noexcept;
  // Throws when the group has ended.
  void check_alive();
  // Why the group can no longer be used, as far as this rank knows.
  std::optional<std::string> failure();

  const Diagnosis& diagnosis() const { return diagnosis_; }
  at::Device device() const { return setup_.device; }
  std::chrono::milliseconds timeout() const { return setup_.timeout; }
  const Store& store() const { return store_; }
  std::string_view name() const { return comm_->name(); }

 private:
  using Calls = std::vector<std::shared_ptr<DeviceCall>>;

  bool is_done(const DeviceCall& call) const;
  void add_replay();
  void watch();
  Calls under_way();
  void examine(const Calls& calls, std::chrono::steady_clock::time_point now);
  void let_go(DeviceCall& call, const c10::Stream& stream);
  bool peek(std::chrono::steady_clock::time_point now);
  void look(DeviceCall& call);
  std::optional<std::string> ended_otherwise();
  void finish_awaited();
  bool claim_end();
  void publish_end(std::string text);

  const Setup setup_;
  const Store store_;
  const Diagnosis diagnosis_;
  PeerStatus peer_status_;
  Processes processes_;
  const std::shared_ptr<DeviceComm> comm_;
  // The watch's own.
  std::chrono::steady_clock::time_point last_look_, last_peek_, last_busy_, last_turn_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  Calls calls_;
  Calls captured_;
  bool closing_ = false;
  bool is_asleep_ = false;  // the watch, until there is a call
  std::atomic<bool> ended_{false};
  std::optional<std::string> dead_;  // follows ended_, once it is known what the others say
  bool told_ = false;
  std::thread watch_;
};

}  // namespace lockstep::comm
