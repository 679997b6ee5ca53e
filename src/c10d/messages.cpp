#include "c10d/messages.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/assign.h"
#include "comm/transport.h"

namespace lockstep::c10d_backend {
namespace {

using Clock = std::chrono::steady_clock;

// Over shared memory a message of 512 bytes is over before its receiver has come.
constexpr int64_t kHead = 512;
struct Head {
  int64_t bytes;
  int32_t tag;
  int32_t dtype;
  at::ScalarType type() const { return static_cast<at::ScalarType>(dtype); }
};
constexpr int64_t kInline = kHead - static_cast<int64_t>(sizeof(Head));

// Waits for heads have no end: a receive has a deadline, which may pass without harm to the group.
const comm::CallOptions kEndless{.timeout = std::chrono::years(10)};

// The elements of a contiguous tensor as bytes that share its memory.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), {static_cast<int64_t>(tensor.nbytes())}, [tensor](void*) {}, at::kByte);
}

// Whether its elements lie in memory one after another as they are.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

Head head_of(const at::Tensor& head) {
  Head value;
  std::memcpy(&value, head.const_data_ptr(), sizeof value);
  return value;
}

comm::CallOptions until(Deadline deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
  return {.timeout = std::max(left, milliseconds(1))};
}

}  // namespace

Messages::Messages(const comm::Group& group)
    : group_(group), sources_(static_cast<size_t>(group.size())) {}

void Messages::add(Send send, std::vector<Finished>& finished) {
  try {
    // A conjugate or negative that libtorch has put off is none in memory.
    send.tensor = send.tensor.resolve_conj().resolve_neg().contiguous();
    send.bytes = as_bytes(send.tensor);
    send.head = at::empty({kHead}, at::kByte);
    const Head head{send.bytes.numel(), send.tag, static_cast<int32_t>(send.tensor.scalar_type())};
    auto* const to = send.head.mutable_data_ptr<uint8_t>();
    std::memcpy(to, &head, sizeof head);
    const bool fits = head.bytes <= kInline;
    if (fits && head.bytes > 0) std::memcpy(to + sizeof head, send.bytes.data_ptr(), head.bytes);
    send.parts.push_back(group_.send(send.head, send.to, 0, until(send.deadline)));
    if (!fits) send.parts.push_back(group_.send(send.bytes, send.to, 1, until(send.deadline)));
    sends_.push_back(std::move(send));
  } catch (...) {
    finished.push_back(ended(std::move(send), translated(std::current_exception())));
  }
}

void Messages::add(Receive receive, std::vector<Finished>& finished) {
  try {
    at::Tensor& to = receive.bytes;
    to = as_bytes(is_plain(receive.tensor)
                      ? receive.tensor
                      : at::empty(receive.tensor.sizes(), receive.tensor.options()));
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (receive.from != kAnyRank && receive.from != rank) continue;
      auto& kept = sources_[rank].kept;
      const auto found = std::find_if(kept.begin(), kept.end(),
                                      [&](const Kept& one) { return one.tag == receive.tag; });
      if (found == kept.end()) continue;
      const Kept message = std::move(*found);
      kept.erase(found);
      hand_over(rank, std::move(receive), message, finished);
      return;
    }
    receives_.push_back(std::move(receive));
  } catch (...) {
    finished.push_back(ended(std::move(receive), translated(std::current_exception())));
  }
}

int64_t Messages::bytes_to_send() const {
  int64_t bytes = 0;
  for (const Send& send : sends_) bytes += send.bytes.numel();
  return bytes;
}

bool Messages::is_wanted(int rank) const {
  return std::any_of(receives_.begin(), receives_.end(), [&](const Receive& one) {
    return one.from == rank || (one.from == kAnyRank && rank != group_.rank());
  });
}

Messages::Receives::iterator Messages::wanted(int rank, int tag) {
  return std::find_if(receives_.begin(), receives_.end(), [&](const Receive& one) {
    return one.tag == tag && (one.from == rank || one.from == kAnyRank);
  });
}

bool Messages::step(std::vector<Finished>& finished) {
  bool moved = step_sends(finished);
  for (int rank = 0; rank < group_.size(); ++rank) {
    while (step_source(rank, finished)) moved = true;
  }
  expire(finished);
  return moved;
}

bool Messages::step_sends(std::vector<Finished>& finished) {
  bool moved = false;
  for (auto it = sends_.begin(); it != sends_.end();) {
    const auto is_over = [](comm::Work& part) { return part.is_completed(); };
    if (!std::all_of(it->parts.begin(), it->parts.end(), is_over)) {
      ++it;
      continue;
    }
    std::exception_ptr error;
    try {
      for (comm::Work& part : it->parts) part.wait();
    } catch (...) {
      error = translated(std::current_exception());
    }
    finished.push_back(ended(std::move(*it), error));
    it = sends_.erase(it);
    moved = true;
  }
  return moved;
}

// True when something moved.
bool Messages::step_source(int rank, std::vector<Finished>& finished) {
  Source& source = sources_[rank];
  try {
    if (source.body) {
      if (!source.body->is_completed()) return false;
      source.body->wait();
      source.body.reset();
      if (source.into) {
        Receive receive = std::move(*source.into);
        source.into.reset();
        const Kept message{receive.tag, receive.tensor.scalar_type(), receive.bytes};
        return hand_over(rank, std::move(receive), message, finished);
      }
      if (!source.keeps) return true;
      Kept kept = std::move(*source.keeps);
      source.keeps.reset();
      // A receive for it may have come since its head did.
      const auto found = wanted(rank, kept.tag);
      if (found == receives_.end()) {
        source.kept.push_back(std::move(kept));
        return true;
      }
      Receive receive = std::move(*found);
      receives_.erase(found);
      return hand_over(rank, std::move(receive), kept, finished);
    }
    if (source.next)
      return (is_wanted(rank) && source.next->is_completed()) && read_head(rank, finished);
    if (!is_wanted(rank)) return false;
    source.head = at::empty({kHead}, at::kByte);
    source.next = group_.recv(source.head, rank, 0, kEndless);
    return true;
  } catch (...) {
    fail_source(rank, translated(std::current_exception()), finished);
    return true;
  }
}

// Finds the receive of the message whose head has come.
bool Messages::read_head(int rank, std::vector<Finished>& finished) {
  Source& source = sources_[rank];
  source.next->wait();
  source.next.reset();
  const Head head = head_of(source.head);
  const auto found = wanted(rank, head.tag);
  const bool fits = head.bytes <= kInline;
  std::optional<Receive> receive;
  if (found != receives_.end()) {
    receive = std::move(*found);
    receives_.erase(found);
  }
  if (fits) {
    Kept message{head.tag, head.type(), source.head.narrow(0, sizeof head, head.bytes)};
    if (receive) return hand_over(rank, std::move(*receive), message, finished);
    source.kept.push_back(std::move(message));
    return true;
  }
  // What does not fit is received into scratch memory, so that later messages can come.
  if (receive &&
      (receive->bytes.numel() != head.bytes || receive->tensor.scalar_type() != head.type())) {
    const at::Tensor rest = at::empty({head.bytes}, at::kByte);
    source.body = group_.recv(rest, rank, 1, kEndless);
    return hand_over(rank, std::move(*receive), {head.tag, head.type(), rest}, finished);
  }
  if (!receive) {
    source.keeps = Kept{head.tag, head.type(), at::empty({head.bytes}, at::kByte)};
    source.body = group_.recv(source.keeps->bytes, rank, 1, kEndless);
    return true;
  }
  // The rest has as long again. When that passes, a half of the message is in the receive's memory,
  // and the group ends.
  source.into = std::move(receive);
  source.body =
      group_.recv(source.into->bytes, rank, 1, {.timeout = source.into->work->getTimeout()});
  return true;
}

// The message becomes the receive's.
bool Messages::hand_over(int rank, Receive receive, const Kept& message,
                         std::vector<Finished>& finished) {
  const at::Tensor& bytes = message.bytes;
  const at::ScalarType dtype = receive.tensor.scalar_type();
  std::exception_ptr error;
  if (receive.bytes.numel() != bytes.numel()) {
    error = failure(fmt::format(
        "[lockstep] rank {} sent {} bytes with tag {}, and rank {} has room for {}: give both "
        "tensors one size and dtype",
        rank, bytes.numel(), receive.tag, group_.rank(), receive.bytes.numel()));
  } else if (message.dtype != dtype) {
    error = failure(fmt::format(
        "[lockstep] rank {} sent {} with tag {}, and rank {} receives {}: give both tensors one "
        "dtype",
        rank, comm::name_of(message.dtype), receive.tag, group_.rank(), comm::name_of(dtype)));
  } else if (bytes.numel() > 0) {
    if (bytes.data_ptr() != receive.bytes.data_ptr())
      std::memcpy(receive.bytes.data_ptr(), bytes.data_ptr(), bytes.nbytes());
    try {
      if (!is_plain(receive.tensor)) {
        comm::assign(receive.tensor, at::from_blob(receive.bytes.data_ptr(), receive.tensor.sizes(),
                                                   receive.tensor.options()));
      }
    } catch (...) {
      error = translated(std::current_exception());
    }
  }
  receive.work->set_source(rank);
  finished.push_back(ended(std::move(receive), error));
  return true;
}

// Nothing more comes from there.
void Messages::fail_source(int rank, const std::exception_ptr& error,
                           std::vector<Finished>& finished) {
  Source& source = sources_[rank];
  source.next.reset();
  source.body.reset();
  if (source.into) {
    finished.push_back(ended(std::move(*source.into), error));
    source.into.reset();
  }
  for (auto it = receives_.begin(); it != receives_.end();) {
    if (it->from != rank && it->from != kAnyRank) {
      ++it;
      continue;
    }
    finished.push_back(ended(std::move(*it), error));
    it = receives_.erase(it);
  }
}

void Messages::expire(std::vector<Finished>& finished) {
  if (receives_.empty()) return;
  const auto now = Clock::now();
  for (auto it = receives_.begin(); it != receives_.end();) {
    if (it->deadline > now) {
      ++it;
      continue;
    }
    const std::string from = it->from == kAnyRank ? "any rank" : fmt::format("rank {}", it->from);
    const auto error =
        failure(fmt::format("[lockstep] rank {} got no message with tag {} from {} within {} ms",
                            group_.rank(), it->tag, from, it->work->getTimeout().count()));
    finished.push_back(ended(std::move(*it), error));
    it = receives_.erase(it);
  }
}

void Messages::idle(std::chrono::microseconds limit, std::vector<Finished>& finished) {
  const size_t count = sources_.size();
  for (size_t i = 0; i <= count; ++i) {
    const size_t at = turn_++ % (count + 1);
    try {
      if (at == count) {
        if (sends_.empty()) continue;
        // Of a long message the head may be over, while the receiver has no room for the rest.
        for (comm::Work& part : sends_.front().parts) {
          if (!part.wait_for(limit)) break;
        }
      } else {
        Source& source = sources_[at];
        const int rank = static_cast<int>(at);
        if (!source.body && !(source.next && is_wanted(rank))) continue;
        (void)(source.body ? *source.body : *source.next).wait_for(limit);
      }
    } catch (const std::exception&) {
      // Thrown again by step().
    }
    break;
  }
  step(finished);
}

void Messages::fail_sends(const std::exception_ptr& error, std::vector<Finished>& finished) {
  for (Send& send : sends_) finished.push_back(ended(std::move(send), error));
  sends_.clear();
}

void Messages::fail_receives(const std::exception_ptr& error, std::vector<Finished>& finished) {
  for (int rank = 0; rank < static_cast<int>(sources_.size()); ++rank)
    fail_source(rank, error, finished);
}

}  // namespace lockstep::c10d_backend
