#include "c10d/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <utility>

#include "c10d/driver.h"
#include "lockstep/core/error.h"

namespace lockstep::c10d_backend {
namespace {

using c10::ivalue::Future;

const Scope kNoScope;

// Of the callbacks, the one that every future here has.
constexpr size_t kOwn = 1;

// The future's own are private, which does not bind an explicit instantiation [temp.spec.general].
template <auto mutex, auto callbacks, auto completed, auto finished, auto value, auto error>
struct Inside {
  friend bool has_callbacks(Future& future) {
    const std::lock_guard lock(future.*mutex);
    return future.completed() || (future.*callbacks).size() > kOwn;
  }
  // markCompleted() or setError(), unless there are callbacks. None can be added in between.
  friend bool complete_without_callbacks(Future& future, c10::IValue& to,
                                         const std::exception_ptr& why) {
    {
      const std::lock_guard lock(future.*mutex);
      if ((future.*callbacks).size() > kOwn) return false;
      (future.*callbacks).clear();
      if (!why) future.*value = std::move(to);
      future.*error = why;
      future.*completed = true;
    }
    (future.*finished).notify_all();
    return true;
  }
};
template struct Inside<&Future::mutex_, &Future::callbacks_, &Future::completed_,
                       &Future::finished_cv_, &Future::value_, &Future::eptr_>;
bool has_callbacks(Future& future);
bool complete_without_callbacks(Future& future, c10::IValue& to, const std::exception_ptr& why);

}  // namespace

std::exception_ptr translated(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const ConfigError& wrong) {
    const std::string text = wrong.what();
    return std::make_exception_ptr(c10::ValueError({__func__, __FILE__, __LINE__}, text));
  } catch (const Error& failed) {
    return failure(failed.what());
  } catch (...) {
    return std::current_exception();
  }
}

std::exception_ptr failure(const std::string& text) {
  return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, text));
}

BackendWork::BackendWork(std::shared_ptr<Driver> driver, int rank, Call call)
    : Work(rank, call.type),
      driver_(std::move(driver)),
      call_(std::move(call)),
      scope_(&kNoScope) {}

void BackendWork::set_scopes(std::shared_ptr<const Scopes> scopes) {
  scopes_ = std::move(scopes);
  if (!scopes_) return;
  for (const Scope& one : *scopes_) {
    if (one.driver == driver_.get()) scope_ = &one;
  }
}

bool BackendWork::wait(milliseconds timeout) {
  if (!is_done()) driver_->wait(*this, timeout);
  if (error_) std::rethrow_exception(error_);
  return true;
}

void BackendWork::abort() { driver_->abort("an operation was aborted"); }

void BackendWork::tell(Future& future) const {
  if (error_) {
    future.setError(error_);
  } else {
    future.markCompleted(value_);
  }
}

c10::intrusive_ptr<Future> BackendWork::getFuture() {
  driver_->expect_callbacks(*this);
  c10::IValue value(call_.outputs);
  const std::lock_guard lock(future_mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
    value_ = std::move(value);
    if (settled_) {
      tell(*future_);  // there can be no callback yet
    } else {
      future_->addCallback([this](Future&) { driver_->begin_callbacks(*this); }, false);
    }
  }
  return future_;
}

bool BackendWork::has_callbacks() {
  const std::lock_guard lock(future_mutex_);
  return future_ && c10d_backend::has_callbacks(*future_);
}

c10::intrusive_ptr<Future> BackendWork::settle(const std::exception_ptr& error) {
  const std::lock_guard lock(future_mutex_);
  error_ = error;
  settled_ = true;
  const bool is_told = future_ && complete_without_callbacks(*future_, value_, error);
  return is_told ? nullptr : future_;
}

bool CoalescedWork::isCompleted() {
  for (const auto& work : works_) {
    if (!work->isCompleted()) return false;
  }
  return true;
}

bool CoalescedWork::isSuccess() const {
  for (const auto& work : works_) {
    if (!work->isSuccess()) return false;
  }
  return true;
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& work : works_) {
    if (auto error = work->exception()) return error;
  }
  return nullptr;
}

bool CoalescedWork::wait(milliseconds timeout) {
  for (const auto& work : works_) work->wait(timeout);
  return true;
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    for (const at::Tensor& tensor : work->result()) all.push_back(tensor);
  }
  return all;
}

c10::intrusive_ptr<Future> CoalescedWork::getFuture() {
  c10::List<c10::intrusive_ptr<Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (const auto& work : works_) futures.push_back(work->getFuture());
  return c10::collectAll(futures);
}

}  // namespace lockstep::c10d_backend
