#include "comm/net/line.h"

#include <fmt/format.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// What is read at a time where frames are short; a longer payload is read to its place.
constexpr size_t kBuffer = 64 << 10;
// What a connection reads before others have their turn.
constexpr int64_t kTurn = 4 << 20;

bool is_temporary(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

[[noreturn]] void lost(int error) { throw Error(std::strerror(error)); }

}  // namespace

void NetLine::open(Fd fd) {
  fd_ = std::move(fd);
  buffer_.reset(new char[kBuffer]);
}

std::vector<NetJob*> NetLine::close() {
  std::vector<NetJob*> jobs;
  for (const Out& out : queue_) {
    if (out.job != nullptr) jobs.push_back(out.job);
  }
  if (target_.job != nullptr) jobs.push_back(target_.job);
  queue_.clear();
  urgent_.clear();
  target_ = {};
  left_ = 0;
  begun_ = 0;
  in_queue_ = false;
  fd_.reset();
  return jobs;
}

void NetLine::send(const NetFrame& frame, const char* payload, NetJob* job,
                   std::function<void()> done) {
  queue_.push_back({.head = frame.packed(),
                    .payload = payload,
                    .bytes = frame.has_payload() ? frame.bytes : 0,
                    .job = job,
                    .done = std::move(done)});
}

void NetLine::send_urgent(const NetFrame& frame, std::string payload) {
  urgent_.push_back({.head = frame.packed() + payload});
}

void NetLine::flush() {
  while (fd_ && has_output() && flush_some()) {
    // Only now, since what is called may send and forget.
    for (const auto& done : std::exchange(finished_, {})) done();
  }
}

// False when the kernel takes no more.
bool NetLine::flush_some() {
  // What has begun, then what is urgent, then the rest.
  iovec parts[32];
  size_t count = 0;
  size_t skip = begun_;
  const auto add = [&](const char* data, size_t size) {
    const size_t gone = std::min(skip, size);
    skip -= gone;
    if (size > gone) parts[count++] = {const_cast<char*>(data) + gone, size - gone};
  };
  const auto add_all = [&](std::deque<Out>& from, size_t first) {
    for (size_t i = first; i < from.size() && count + 2 <= std::size(parts); ++i) {
      add(from[i].head.data(), from[i].head.size());
      add(from[i].payload, static_cast<size_t>(from[i].bytes));
    }
  };
  const bool first_is_of_queue = in_queue_ && begun_ > 0;
  if (first_is_of_queue) {
    add(queue_.front().head.data(), queue_.front().head.size());
    add(queue_.front().payload, static_cast<size_t>(queue_.front().bytes));
  }
  add_all(urgent_, 0);
  add_all(queue_, first_is_of_queue ? 1 : 0);
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  const ssize_t written = sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
  if (written < 0) {
    if (errno == EINTR) return true;
    if (is_temporary(errno)) return false;
    lost(errno);
  }
  size_t left = begun_ + static_cast<size_t>(written);
  if (first_is_of_queue) {
    sent(queue_, left);
    if (left > 0 && begun_ > 0) return true;  // still the same one
  }
  begun_ = 0;
  while (left > 0 && !urgent_.empty() && !(in_queue_ && begun_ > 0)) {
    in_queue_ = false;
    sent(urgent_, left);
    if (begun_ > 0) return true;
  }
  while (left > 0 && !queue_.empty()) {
    in_queue_ = true;
    sent(queue_, left);
    if (begun_ > 0) return true;
  }
  return true;
}

// Takes the first of `from` out when `count` bytes are all of it; begun_ says how much was, else.
void NetLine::sent(std::deque<Out>& from, size_t& count) {
  const size_t whole = from.front().head.size() + static_cast<size_t>(from.front().bytes);
  if (count < whole) {
    begun_ = count;
    return;
  }
  count -= whole;
  begun_ = 0;
  if (from.front().done) finished_.push_back(std::move(from.front().done));
  from.pop_front();
}

void NetLine::read() {
  for (int64_t taken = 0; taken < kTurn;) {
    ssize_t got = 0;
    if (left_ > static_cast<int64_t>(kBuffer) / 2 && target_.to != nullptr) {
      // Straight to its place, and what follows it beside.
      iovec parts[2] = {{target_.to, static_cast<size_t>(left_)}, {buffer_.get(), kBuffer}};
      got = readv(fd_.get(), parts, 2);
      if (got > 0) {
        const int64_t mine = std::min<int64_t>(got, left_);
        target_.to += mine;
        left_ -= mine;
        if (left_ == 0) end_payload();
        if (got > mine) consume({buffer_.get(), static_cast<size_t>(got - mine)});
      }
    } else {
      got = recv(fd_.get(), buffer_.get(), kBuffer, 0);
      if (got > 0) consume({buffer_.get(), static_cast<size_t>(got)});
    }
    if (got == 0) throw Error("its connection was closed");
    if (got < 0) {
      if (errno == EINTR) continue;
      if (is_temporary(errno)) return;
      lost(errno);
    }
    taken += got;
  }
}

void NetLine::consume(std::string_view bytes) {
  while (!bytes.empty()) {
    if (left_ > 0) {
      const auto size =
          static_cast<size_t>(std::min<int64_t>(left_, static_cast<int64_t>(bytes.size())));
      if (target_.to != nullptr) {
        std::memcpy(target_.to, bytes.data(), size);
        target_.to += size;
      }
      left_ -= static_cast<int64_t>(size);
      bytes.remove_prefix(size);
      if (left_ == 0) end_payload();
      continue;
    }
    const size_t size = std::min(NetFrame::kBytes - head_.size(), bytes.size());
    head_.append(bytes.substr(0, size));
    bytes.remove_prefix(size);
    if (head_.size() < NetFrame::kBytes) return;
    const NetFrame frame = NetFrame::unpacked(head_.data());
    head_.clear();
    NetTarget target = sink_.arrived(peer_, frame);
    if (!frame.has_payload()) continue;
    target_ = std::move(target);
    left_ = frame.bytes;
    if (left_ == 0) end_payload();
  }
}

void NetLine::end_payload() {
  const auto done = std::exchange(target_, {}).done;
  if (done) done();
}

void NetLine::forget(const NetJob* job) {
  if (job == nullptr) return;
  if (target_.job == job) target_ = {};
  const bool begun = in_queue_ && begun_ > 0;
  for (size_t i = 0; i < queue_.size();) {
    Out& out = queue_[i];
    if (out.job != job) {
      ++i;
    } else if (i == 0 && begun) {
      // The peer reads to its end.
      out.kept.assign(out.payload, out.payload + out.bytes);
      out.payload = out.kept.data();
      out.job = nullptr;
      out.done = nullptr;
      ++i;
    } else {
      queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

bool NetLine::lingers() {
  try {
    flush();
  } catch (const Error&) {
    return false;
  }
  for (;;) {
    const ssize_t got = recv(fd_.get(), buffer_.get(), kBuffer, 0);
    if (got > 0 || (got < 0 && errno == EINTR)) continue;
    if (got == 0 || !is_temporary(errno)) return false;
    break;
  }
  int unsent = 0;
  return has_output() || (ioctl(fd_.get(), SIOCOUTQ, &unsent) == 0 && unsent > 0);
}

}  // namespace lockstep::comm
