#include "lockstep/c10d/backend.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "c10d/process_group.h"
#include "comm/text.h"
#include "lockstep/core/error.h"

namespace lockstep::c10d_backend {
namespace {

// The drivers of this process that may have threads, for shut_all_down().
struct Drivers {
  std::mutex mutex;
  std::set<std::weak_ptr<Driver>, std::owner_less<>> alive;
  bool ended = false;
};

Drivers& drivers() {
  static auto& all = *new Drivers;
  return all;
}

comm::Group joined(const c10::intrusive_ptr<::c10d::Store>& store, const comm::Membership& me,
                   const comm::GroupOptions& options) {
  try {
    return comm::join_group(store, me, options);
  } catch (const Error&) {
    std::rethrow_exception(translated(std::current_exception()));
  }
}

}  // namespace

ProcessGroup::ProcessGroup(comm::Group group, milliseconds timeout)
    : Backend(group.rank(), group.size()),
      options_(c10::make_intrusive<Options>("lockstep", timeout)),
      driver_(not_for_children(std::make_shared<Driver>(std::move(group)))) {
  init();
  const std::lock_guard lock(drivers().mutex);
  TORCH_CHECK_WITH(DistBackendError, !drivers().ended, "[lockstep] the process is ending");
  drivers().alive.insert(driver_);
}

// A program that ends without destroy_process_group() is not kept for long.
ProcessGroup::~ProcessGroup() { end(kAtExit); }

void ProcessGroup::end(milliseconds patience) {
  if (!driver_->is_here()) return;
  {
    const std::lock_guard lock(drivers().mutex);
    drivers().alive.erase(driver_);
  }
  driver_->close(patience);
}

void ProcessGroup::abort() { driver_->abort("the process group was aborted"); }

::c10d::ErrorType ProcessGroup::getError() {
  return driver_->is_dead() ? ::c10d::ErrorType::COMM_ERROR : ::c10d::ErrorType::SUCCESS;
}

c10::intrusive_ptr<::c10d::Backend> ProcessGroup::split(
    const c10::intrusive_ptr<::c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& opts) {
  const auto own = std::find(ranks.begin(), ranks.end(), getRank());
  TORCH_CHECK_VALUE(own != ranks.end(), "[lockstep] split: rank ", getRank(),
                    " is not among the new group's");
  const milliseconds timeout = opts ? opts->timeout : options_->timeout;
  comm::Membership me{static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size())};
  if (opts && opts->global_ranks_in_group.size() == ranks.size()) {
    const auto& of_job = opts->global_ranks_in_group;
    me.world_ranks.assign(of_job.begin(), of_job.end());
  }
  auto child = make_backend(store, me, {.timeout = timeout});
  if (opts) {
    auto options = child->getBackendOptions();
    options->group_name = opts->group_name;
    options->group_desc = opts->group_desc;
    options->global_ranks_in_group = opts->global_ranks_in_group;
  }
  return child;
}

void ProcessGroup::startCoalescing() { coalescing_.start(); }

c10::intrusive_ptr<::c10d::Work> ProcessGroup::endCoalescing() {
  auto works = coalescing_.end();
  TORCH_CHECK(works, "[lockstep] endCoalescing() without startCoalescing()");
  return c10::make_intrusive<CoalescedWork>(getRank(), std::move(*works));
}

c10::intrusive_ptr<BackendWork> ProcessGroup::new_work(::c10d::OpType type,
                                                       std::vector<at::Tensor> outputs,
                                                       milliseconds timeout) {
  return c10::make_intrusive<BackendWork>(
      driver_, getRank(), BackendWork::Call{type, std::move(outputs), ++number_, timeout});
}

milliseconds ProcessGroup::timeout_of(milliseconds asked) const {
  return asked == ::c10d::kUnsetTimeout ? options_->timeout : asked;
}

c10::intrusive_ptr<::c10d::Work> ProcessGroup::run(const Call& call, std::vector<Stage> stages) {
  const CoalescingGuard guard{coalescing_};
  auto work = new_work(call.type, call.outputs, timeout_of(call.timeout));
  int64_t bytes = 0;
  for (const at::Tensor& tensor : call.outputs) {
    if (tensor.layout() == at::kStrided) bytes += static_cast<int64_t>(tensor.nbytes());
  }
  constexpr int64_t kShort = 256 << 10;
  driver_->submit(Job{std::move(stages), work, bytes <= kShort},
                  !call.async && !coalescing_.is_here());
  coalescing_.add(work);
  return work;
}

c10::intrusive_ptr<::c10d::Work> ProcessGroup::send(std::vector<at::Tensor>& tensors, int to,
                                                    int tag) {
  const CoalescingGuard guard{coalescing_};
  return send_one(only(tensors, "send"), to, tag, options_->timeout);
}

c10::intrusive_ptr<BackendWork> ProcessGroup::send_one(const at::Tensor& tensor, int to, int tag,
                                                       milliseconds timeout) {
  TORCH_CHECK_VALUE(to >= 0 && to < getSize() && to != getRank(), "[lockstep] send: rank ", to,
                    " is not another rank of this group of ", getSize());
  auto work = new_work(::c10d::OpType::SEND, {tensor}, timeout);
  driver_->submit(Send{tensor, to, tag, deadline_in(timeout), work});
  coalescing_.add(work);
  return work;
}

c10::intrusive_ptr<::c10d::Work> ProcessGroup::recv(std::vector<at::Tensor>& tensors, int from,
                                                    int tag) {
  const CoalescingGuard guard{coalescing_};
  TORCH_CHECK_VALUE(from >= 0 && from < getSize() && from != getRank(), "[lockstep] recv: rank ",
                    from, " is not another rank of this group of ", getSize());
  return recv_one(only(tensors, "recv"), from, tag, options_->timeout);
}

c10::intrusive_ptr<::c10d::Work> ProcessGroup::recvAnysource(std::vector<at::Tensor>& tensors,
                                                             int tag) {
  const CoalescingGuard guard{coalescing_};
  return recv_one(only(tensors, "recv"), kAnyRank, tag, options_->timeout);
}

c10::intrusive_ptr<BackendWork> ProcessGroup::recv_one(const at::Tensor& tensor, int from, int tag,
                                                       milliseconds timeout) {
  const auto type = from == kAnyRank ? ::c10d::OpType::RECVANYSOURCE : ::c10d::OpType::RECV;
  auto work = new_work(type, {tensor}, timeout);
  driver_->submit(Receive{tensor, from, tag, deadline_in(timeout), work});
  coalescing_.add(work);
  return work;
}

// As Gloo's: all others send to rank 0, which names those that have not come; the others wait for
// its answer.
void ProcessGroup::monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) {
  constexpr int kTag = -7;  // c10d's own are not negative
  const milliseconds timeout = bounded(timeout_of(opts.timeout));
  const auto start = std::chrono::steady_clock::now();
  const auto left = [&] {
    const auto spent = std::chrono::steady_clock::now() - start;
    return std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(timeout - spent));
  };
  const at::Tensor word = at::zeros({1}, at::kByte);
  if (getRank() != 0) {
    send_one(word, 0, kTag, timeout)->wait();
    try {
      recv_one(word, 0, kTag, timeout)->wait();
    } catch (const std::exception& error) {
      TORCH_CHECK_WITH(DistBackendError, false, "[Rank ", getRank(),
                       "]: Rank 0 did not answer in monitoredBarrier within ", timeout.count(),
                       " ms: ", comm::first_line(error));
    }
    return;
  }
  std::vector<c10::intrusive_ptr<BackendWork>> words;
  for (int rank = 1; rank < getSize(); ++rank)
    words.push_back(recv_one(at::empty({1}, at::kByte), rank, kTag, timeout));
  std::vector<std::string> missing;
  for (int rank = 1; rank < getSize(); ++rank) {
    try {
      words[rank - 1]->wait(left());
    } catch (const std::exception& error) {
      missing.push_back(std::to_string(rank));
      TORCH_CHECK(wait_all_ranks, "[Rank 0]: Rank ", rank, " failed to pass monitoredBarrier in ",
                  timeout.count(), " ms: ", comm::first_line(error));
    }
  }
  TORCH_CHECK(missing.empty(), "[Rank 0]: Ranks ", fmt::format("{}", fmt::join(missing, ", ")),
              " failed to pass monitoredBarrier in ", timeout.count(), " ms");
  std::vector<c10::intrusive_ptr<BackendWork>> answers;
  for (int rank = 1; rank < getSize(); ++rank)
    answers.push_back(send_one(word, rank, kTag, timeout));
  for (const auto& answer : answers) answer->wait();
}

c10::intrusive_ptr<::c10d::Backend> make_backend(const c10::intrusive_ptr<::c10d::Store>& store,
                                                 const comm::Membership& me,
                                                 const comm::GroupOptions& options) {
  return c10::make_intrusive<ProcessGroup>(joined(store, me, options), options.timeout);
}

void shut_all_down() noexcept {
  decltype(Drivers::alive) all;
  {
    const std::lock_guard lock(drivers().mutex);
    drivers().ended = true;
    all = drivers().alive;
  }
  for (const auto& one : all) {
    if (const auto driver = one.lock()) driver->leave(kAtExit);
  }
}

}  // namespace lockstep::c10d_backend
