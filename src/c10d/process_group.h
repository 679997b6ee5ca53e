// The backend: what c10d calls, as stages of the driver and as messages.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "c10d/driver.h"
#include "c10d/tensors.h"
#include "c10d/work.h"
#include "core/time_limit.h"
#include "lockstep/c10d/backend.h"

namespace lockstep::c10d_backend {

// How long a process that ends completes operations that other ranks wait for.
constexpr milliseconds kAtExit{1000};

class ProcessGroup final : public ::c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

  ProcessGroup(comm::Group group, milliseconds timeout);
  ~ProcessGroup() override;

  const std::string getBackendName() const override { return "lockstep"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(milliseconds timeout) override { options_->timeout = timeout; }
  uint64_t getSequenceNumberForGroup() override { return number_; }
  void setSequenceNumberForGroup() override {}
  void abort() override;
  void shutdown() override { end(options_->timeout); }
  ::c10d::ErrorType getError() override;
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<::c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override;
  // torch's _coalescing_manager, which batch_isend_irecv() enters where this is true, has no end
  // for an exception: all later calls of the group would be recorded and never made.
  bool supportsCoalescing() const override { return false; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  // DDP's reducer asks for its buckets here when DDP_DISABLE_COMM_MEM=0. Every rank calls it.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  WorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const ::c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) override;
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(Lists& outputs, Tensors& inputs,
                              const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::AllgatherOptions& opts) override;
  WorkPtr gather(Lists& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) override;
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                             const ::c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const ::c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs,
                         const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits,
                        const ::c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const ::c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  struct Call {
    ::c10d::OpType type;
    Tensors outputs;
    milliseconds timeout;
    bool async;
  };

  // What threads between startCoalescing() and endCoalescing() have started, each for itself:
  // callbacks of futures call in other threads meanwhile.
  class Coalescing {
   public:
    using Works = std::vector<c10::intrusive_ptr<BackendWork>>;
    void start() {
      end();
      const std::lock_guard lock(mutex_);
      works_.try_emplace(std::this_thread::get_id());
    }
    bool is_here() {
      const std::lock_guard lock(mutex_);
      return works_.contains(std::this_thread::get_id());
    }
    void add(const c10::intrusive_ptr<BackendWork>& work) {
      const std::lock_guard lock(mutex_);
      const auto found = works_.find(std::this_thread::get_id());
      if (found != works_.end()) found->second.push_back(work);
    }
    // Nothing where this thread has not started.
    std::optional<Works> end() {
      const std::lock_guard lock(mutex_);
      auto ended = works_.extract(std::this_thread::get_id());
      return ended ? std::optional(std::move(ended.mapped())) : std::nullopt;
    }

   private:
    std::mutex mutex_;
    std::map<std::thread::id, Works> works_;
  };
  // A call between startCoalescing() and endCoalescing() that throws leaves the one without the
  // other; what was started in between ends by itself. Every call that may throw begins with it.
  struct CoalescingGuard {
    Coalescing& coalescing;
    const int exceptions = std::uncaught_exceptions();
    ~CoalescingGuard() {
      if (std::uncaught_exceptions() > exceptions) coalescing.end();
    }
  };

  void end(milliseconds patience);
  c10::intrusive_ptr<BackendWork> new_work(::c10d::OpType type, Tensors outputs,
                                           milliseconds timeout);
  c10::intrusive_ptr<BackendWork> send_one(const at::Tensor& tensor, int to, int tag,
                                           milliseconds timeout);
  c10::intrusive_ptr<BackendWork> recv_one(const at::Tensor& tensor, int from, int tag,
                                           milliseconds timeout);
  milliseconds timeout_of(milliseconds asked) const;
  static Deadline deadline_in(milliseconds timeout) {
    return std::chrono::steady_clock::now() + bounded(timeout);
  }
  static const at::Tensor& only(const Tensors& tensors, const char* what);
  const comm::Group& group() const { return driver_->group(); }
  WorkPtr run(const Call& call, std::vector<Stage> stages);

  const c10::intrusive_ptr<Options> options_;
  const std::shared_ptr<Driver> driver_;
  std::atomic<uint64_t> number_ = 0;
  Coalescing coalescing_;
};

}  // namespace lockstep::c10d_backend
