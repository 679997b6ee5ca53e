#include "comm/nccl/communicator.h"

#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Between two looks at a call that NCCL continues by itself.
constexpr std::chrono::microseconds kNap{50};
// How long an orderly end may take; after that it is an abort.
constexpr milliseconds kFarewell{2000};

}  // namespace

nccl::Communicator* NcclComm::alive() const {
  if (comm_ == nullptr) throw CommError("the communicator was aborted");
  return comm_;
}

std::string NcclComm::text_of(nccl::Result result) const {
  const char* last = api_.GetLastError(comm_);
  std::string text = api_.GetErrorString(result);
  if (last != nullptr && *last != '\0') text += fmt::format(": {}", last);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

void NcclComm::check(nccl::Result result, const char* call) const {
  if (result == nccl::Success || result == nccl::InProgress) return;
  throw CommError(fmt::format("{}: {}", call, text_of(result)));
}

// Until NCCL has done what it said is in progress.
void NcclComm::settle(const char* call) {
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      nccl::Result state = nccl::Success;
      check(api_.CommGetAsyncError(alive(), &state), call);
      check(state, call);
      if (state == nccl::Success) return;
    }
    std::this_thread::sleep_for(kNap);
  }
}

void NcclComm::connect() {
  {
    const std::lock_guard lock(mutex_);
    nccl::Config config;
    check(api_.CommInitRankConfig(&comm_, setup_.size, setup_.id, setup_.rank, &config),
          "ncclCommInitRankConfig");
  }
  settle("ncclCommInitRankConfig");
}

void NcclComm::enqueue(const Calls& calls) {
  {
    const std::lock_guard lock(mutex_);
    nccl::Communicator* comm = alive();
    check(api_.GroupStart(), "ncclGroupStart");
    const nccl::Result made = calls(api_, comm);
    const nccl::Result ended = api_.GroupEnd();
    check(made, "a call");
    check(ended, "ncclGroupEnd");
  }
  settle("ncclGroupEnd");
}

void* NcclComm::enlist(void* memory, size_t bytes) {
  if (api_.CommRegister == nullptr || api_.CommDeregister == nullptr) return nullptr;
  void* handle = nullptr;
  {
    const std::lock_guard lock(mutex_);
    check(api_.CommRegister(alive(), memory, bytes, &handle), "ncclCommRegister");
  }
  settle("ncclCommRegister");
  return handle;
}

void NcclComm::dismiss(void* handle) noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ != nullptr && handle != nullptr) api_.CommDeregister(comm_, handle);
}

void NcclComm::close() noexcept {
  const auto until = steady_clock::now() + kFarewell;
  nccl::Result state = nccl::Success;
  {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return;
    state = api_.CommFinalize(comm_);
  }
  while ((state == nccl::Success || state == nccl::InProgress) && steady_clock::now() < until) {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return;
    if (api_.CommGetAsyncError(comm_, &state) != nccl::Success || state != nccl::InProgress) break;
    std::this_thread::sleep_for(kNap);
  }
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr || state != nccl::Success) return;  // the destructor aborts
  api_.CommDestroy(std::exchange(comm_, nullptr));
}

std::optional<std::string> NcclComm::async_error() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || comm_ == nullptr) return std::nullopt;
  nccl::Result state = nccl::Success;
  const nccl::Result asked = api_.CommGetAsyncError(comm_, &state);
  const nccl::Result worst = asked == nccl::Success ? state : asked;
  if (worst == nccl::Success || worst == nccl::InProgress) return std::nullopt;
  return text_of(worst);
}

void NcclComm::end() noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ != nullptr) api_.CommAbort(std::exchange(comm_, nullptr));
}

}  // namespace lockstep::comm
