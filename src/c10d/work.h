// An operation as c10d's Work.
#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace lockstep::c10d_backend {

class Driver;

using std::chrono::milliseconds;

// An exception of ours as c10d's: ConfigError as c10::ValueError, others as c10::DistBackendError.
std::exception_ptr translated(const std::exception_ptr& error);
// A c10::DistBackendError.
std::exception_ptr failure(const std::string& text);

// Where an operation's callbacks stand in the order in which ranks start collectives: a number for
// each operation in whose callbacks it was started, from the outermost, and its own.
using Place = std::vector<uint64_t>;

// A callback of a future, in which operations are started.
struct Scope {
  const Driver* driver = nullptr;
  uint64_t callback = 0;
  Place place = {};
};
// Of the callbacks that a thread runs, and those in which their operations were started: the
// innermost of each driver.
using Scopes = std::vector<Scope>;

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
  // first completes a future without callbacks, and gives one that has some; in the second these
  // run; waiting threads continue after the last.
  c10::intrusive_ptr<c10::ivalue::Future> settle(const std::exception_ptr& error);
  void tell(c10::ivalue::Future& future) const;
  // Whether callbacks were added to its future, or are being run.
  bool has_callbacks();
  void mark_done() { done_.store(true, std::memory_order_release); }
  // For the driver, with its mutex held: whether the first of them is over.
  bool is_settled() const { return settled_; }
  // The callbacks in which it was started, and the one of its driver, with number 0 for none. Set
  // once, before it is submitted.
  const std::shared_ptr<const Scopes>& scopes() const { return scopes_; }
  void set_scopes(std::shared_ptr<const Scopes> scopes);
  const Scope& scope() const { return *scope_; }
  // For the driver, with its mutex held: empty until its future is seen to have callbacks.
  const Place& place() const { return place_; }
  void set_place(Place place) { place_ = std::move(place); }
  bool is_message() const { return ::c10d::isP2POp(retrieveOpType()); }

 private:
  const std::shared_ptr<Driver> driver_;
  const Call call_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when it is asked for
  c10::IValue value_;                               // the future's
  bool settled_ = false;
  std::exception_ptr error_;
  int source_ = -1;
  std::shared_ptr<const Scopes> scopes_;
  const Scope* scope_;
  Place place_;
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
