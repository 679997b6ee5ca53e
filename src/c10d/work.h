// An operation as c10d's Work.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace lockstep::c10d_backend {

class Driver;

using std::chrono::milliseconds;

// An exception of ours as c10d's: ConfigError as c10::ValueError, others as c10::DistBackendError.
std::exception_ptr translated(const std::exception_ptr& error);
// A c10::DistBackendError.
std::exception_ptr failure(const std::string& text);

class BackendWork final : public ::c10d::Work {
 public:
  struct Call {
    ::c10d::OpType type = ::c10d::OpType::UNKNOWN;
    std::vector<at::Tensor> outputs = {};
    uint64_t number = 0;
    milliseconds timeout{0};
  };
  BackendWork(std::shared_ptr<Driver> driver, int rank, Call call);

  bool isCompleted() override { return is_done(); }
  bool isSuccess() const override { return is_done() && !error_; }
  std::exception_ptr exception() const override { return is_done() ? error_ : nullptr; }
  bool wait(milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override;
  std::vector<at::Tensor> result() override { return call_.outputs; }
  int sourceRank() const override { return source_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return call_.number; }
  milliseconds getTimeout() const override { return call_.timeout; }

  bool is_done() const { return done_.load(std::memory_order_acquire); }
  const std::exception_ptr& error() const { return error_; }
  void set_source(int rank) { source_ = rank; }
  // The steps of its end, of which the driver takes the first and the last with its mutex held. The
  // first gives the future, if it has been asked for; in the second the future's callbacks run;
  // waiting threads continue after the last.
  c10::intrusive_ptr<c10::ivalue::Future> settle(const std::exception_ptr& error);
  void tell(c10::ivalue::Future& future) const;
  void mark_done() { done_.store(true, std::memory_order_release); }
  // For the driver, with its mutex held: whether the first of them is over, and the number of the
  // callback in which the operation was started, 0 in none.
  bool is_settled() const { return settled_; }
  uint64_t parent() const { return parent_; }
  void set_parent(uint64_t callback) { parent_ = callback; }

 private:
  const std::shared_ptr<Driver> driver_;
  const Call call_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when it is asked for
  bool settled_ = false;
  std::exception_ptr error_;
  int source_ = -1;
  uint64_t parent_ = 0;
  std::atomic<bool> done_ = false;
};

// Several operations that were started together.
class CoalescedWork final : public ::c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<c10::intrusive_ptr<BackendWork>> works)
      : Work(rank, ::c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<c10::intrusive_ptr<BackendWork>> works_;
};

}  // namespace lockstep::c10d_backend
