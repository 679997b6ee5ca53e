// One NCCL communicator, made so that none of its calls blocks for longer than another thread
// allows: abort() ends a call that waits in it.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "comm/nccl/api.h"

namespace lockstep::comm {

class NcclComm {
 public:
  explicit NcclComm(const nccl::Api& api) : api_(api) {}
  // Aborts, unless close() came first.
  ~NcclComm() { abort(); }
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // The one thread that makes calls. All throw CommError when NCCL reports an error, or after an
  // abort().

  // Meets the other ranks; the caller's current device is the communicator's.
  void connect(const nccl::UniqueId& id, int rank, int size);
  // `calls` as one group: nothing of it waits for another part of it. Returns when all is enqueued.
  using Calls = std::function<nccl::Result(const nccl::Api&, nccl::Communicator*)>;
  void enqueue(const Calls& calls);
  // Memory that NCCL may access directly; null when this version registers none.
  void* enlist(void* memory, size_t bytes);
  void dismiss(void* handle) noexcept;
  // Ends the communicator, of which all calls are over.
  void close() noexcept;

  // Any thread.

  // What has gone wrong since; never blocks.
  std::optional<std::string> async_error();
  void abort() noexcept;
  const nccl::Api& api() const { return api_; }

 private:
  nccl::Communicator* alive() const;
  std::string text_of(nccl::Result result) const;
  void check(nccl::Result result, const char* call) const;
  void settle(const char* call);

  const nccl::Api& api_;
  std::mutex mutex_;  // of the communicator
  nccl::Communicator* comm_ = nullptr;
};

}  // namespace lockstep::comm
