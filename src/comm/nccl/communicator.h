// One NCCL communicator, made so that none of its calls blocks for longer than another thread
// allows: abort() ends a call that waits in it.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "comm/device/comm.h"
#include "comm/nccl/api.h"

namespace lockstep::comm {

class NcclComm : public DeviceComm {
 public:
  // What all of its ranks give, the same but for their numbers.
  struct Setup {
    nccl::UniqueId id;
    int rank = 0;
    int size = 1;
  };
  NcclComm(const nccl::Api& api, const Setup& setup) : api_(api), setup_(setup) {}
  // Aborts, unless close() came first.
  ~NcclComm() override { end(); }
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // The one thread that makes calls. All throw CommError when NCCL reports an error, or after an
  // abort().

  void connect() override;
  // `calls` as one group: nothing of it waits for another part of it. Returns when all is enqueued.
  using Calls = std::function<nccl::Result(const nccl::Api&, nccl::Communicator*)>;
  void enqueue(const Calls& calls);
  // Memory that NCCL may access directly; null when this version registers none.
  void* enlist(void* memory, size_t bytes);
  void dismiss(void* handle) noexcept;
  void close() noexcept override;

  // Any thread.

  std::string_view name() const override { return "nccl"; }
  std::optional<std::string> async_error() override;
  void abort() noexcept override { end(); }
  const nccl::Api& api() const { return api_; }
  int rank() const { return setup_.rank; }
  int size() const { return setup_.size; }

 private:
  nccl::Communicator* alive() const;
  std::string text_of(nccl::Result result) const;
  void check(nccl::Result result, const char* call) const;
  void settle(const char* call);
  void end() noexcept;

  const nccl::Api& api_;
  const Setup setup_;
  std::mutex mutex_;  // of the communicator
  nccl::Communicator* comm_ = nullptr;
};

}  // namespace lockstep::comm
