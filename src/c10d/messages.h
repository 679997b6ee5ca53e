// Messages from one rank to another, by tag in any order and from any rank, over a group whose
// messages between two ranks come in the order in which they were sent.
//
// Each message begins with a piece of a fixed size: tag, length, and the data if it fits. A rank
// that receives keeps one receive for such a piece under way for each rank that may send it
// something; a message without a receive yet is kept until there is one.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "c10d/work.h"
#include "lockstep/comm/group.h"

namespace lockstep::c10d_backend {

using Deadline = std::chrono::steady_clock::time_point;

constexpr int kAnyRank = -1;

struct Send {
  at::Tensor tensor;
  int to = 0;
  int tag = 0;
  Deadline deadline = Deadline::max();
  c10::intrusive_ptr<BackendWork> work;

  at::Tensor bytes = {};  // what leaves
  at::Tensor head = {};
  std::vector<comm::Work> parts = {};
};

struct Receive {
  at::Tensor tensor;
  int from = kAnyRank;
  int tag = 0;
  Deadline deadline = Deadline::max();
  c10::intrusive_ptr<BackendWork> work;

  at::Tensor bytes = {};  // where it arrives
};

// An operation that is over, and what it held.
struct Finished {
  c10::intrusive_ptr<BackendWork> work;
  std::exception_ptr error;
  std::shared_ptr<void> held;
};

template <class Held>
Finished ended(Held held, const std::exception_ptr& error) {
  auto work = held.work;
  return {std::move(work), error, std::make_shared<Held>(std::move(held))};
}

// Belongs to the thread that drives the group.
class Messages {
 public:
  explicit Messages(const comm::Group& group);

  void add(Send send, std::vector<Finished>& finished);
  void add(Receive receive, std::vector<Finished>& finished);
  // Takes all further without waiting; true when something moved.
  bool step(std::vector<Finished>& finished);
  // Waits for one of them, for `limit` at most, and notices ranks that have ended.
  void idle(std::chrono::microseconds limit, std::vector<Finished>& finished);
  bool sending() const { return !sends_.empty(); }
  size_t sends() const { return sends_.size(); }
  int64_t bytes_to_send() const;
  bool receiving() const {
    return !receives_.empty() ||
           std::any_of(sources_.begin(), sources_.end(),
                       [](const Source& one) { return one.body.has_value(); });
  }
  // Ends them all.
  void fail_sends(const std::exception_ptr& error, std::vector<Finished>& finished);
  void fail_receives(const std::exception_ptr& error, std::vector<Finished>& finished);

 private:
  struct Kept {
    int tag = 0;
    at::ScalarType dtype = at::kByte;
    at::Tensor bytes;
  };
  // What comes from one rank.
  struct Source {
    at::Tensor head;
    std::optional<comm::Work> next;  // the head's receive
    std::optional<comm::Work> body;  // the rest of the message whose head is here
    std::optional<Receive> into;     // the receive of the body, of the same dtype
    std::optional<Kept> keeps;       // else where it is kept, if anywhere
    std::deque<Kept> kept = {};
  };
  using Receives = std::deque<Receive>;

  bool is_wanted(int rank) const;
  Receives::iterator wanted(int rank, int tag);
  bool step_sends(std::vector<Finished>& finished);
  bool step_source(int rank, std::vector<Finished>& finished);
  bool read_head(int rank, std::vector<Finished>& finished);
  bool hand_over(int rank, Receive receive, const Kept& message, std::vector<Finished>& finished);
  void fail_source(int rank, const std::exception_ptr& error, std::vector<Finished>& finished);
  void expire(std::vector<Finished>& finished);

  const comm::Group& group_;
  std::deque<Send> sends_;
  Receives receives_;  // that have no message yet
  std::vector<Source> sources_;
  size_t turn_ = 0;  // the rank that idle() waits for next
};

}  // namespace lockstep::c10d_backend
