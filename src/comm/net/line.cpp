#include "comm/net/line.h"

#include <fmt/format.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// What is read at a time where frames are short; a longer payload is read to its place.
constexpr size_t kBuffer = 64 << 10;
// How much a connection reads before others get their turn.
constexpr int64_t kTurn = 4 << 20;
// The most that one TLS record holds, and how much is encrypted before the kernel takes it.
constexpr size_t kRecord = 16 << 10;
constexpr size_t kMostEncrypted = 256 << 10;

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

[[noreturn]] void lost(int error) {
  throw Error(fmt::format("lost its connection: {}", std::strerror(error)));
}

}  // namespace

void NetLine::open(Fd fd, std::optional<Tls> tls) {
  fd_ = std::move(fd);
  // In place, since a channel can be moved but not assigned.
  if (tls) tls_.emplace(std::move(*tls));
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
  tls_.reset();
  encrypted_.clear();
  encrypted_at_ = 0;
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
  const ssize_t written = tls_ ? encrypt(parts, count) : hand_over(parts, count);
  if (written < 0) return false;
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

// How much the kernel has taken of `parts`; -1 when it takes nothing now.
ssize_t NetLine::hand_over(const iovec* parts, size_t count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = count;
  for (;;) {
    const ssize_t written = sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
    if (written >= 0) return written;
    if (errno == EINTR) continue;
    if (would_block(errno)) return -1;
    lost(errno);
  }
}

// The same for what is encrypted first, of which some may wait here for the kernel.
ssize_t NetLine::encrypt(const iovec* parts, size_t count) {
  if (!send_encrypted()) return -1;
  std::array<char, kRecord> record;
  size_t filled = 0, done = 0;
  const auto end_record = [&] {
    tls_->write({record.data(), filled});
    done += filled;
    filled = 0;
  };
  for (size_t i = 0; i < count && done < kMostEncrypted; ++i) {
    std::string_view part(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
    while (!part.empty() && done < kMostEncrypted) {
      const size_t size = std::min(part.size(), kRecord - filled);
      if (size == kRecord) {
        tls_->write(part.substr(0, size));
        done += size;
      } else {
        std::memcpy(record.data() + filled, part.data(), size);
        filled += size;
        if (filled == kRecord) end_record();
      }
      part.remove_prefix(size);
    }
  }
  end_record();
  encrypted_ = tls_->take_output();
  encrypted_at_ = 0;
  send_encrypted();
  return static_cast<ssize_t>(done);
}

// False while the kernel takes no more.
bool NetLine::send_encrypted() {
  while (has_encrypted()) {
    const iovec rest{encrypted_.data() + encrypted_at_, encrypted_.size() - encrypted_at_};
    const ssize_t written = hand_over(&rest, 1);
    if (written < 0) return false;
    encrypted_at_ += static_cast<size_t>(written);
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
    const ssize_t got = receive();
    if (got == 0) throw Error("has closed its connection");
    if (got < 0) {
      if (errno == EINTR) continue;
      if (would_block(errno)) return;
      lost(errno);
    }
    taken += got;
  }
}

// What recv() returns, once what has come is where it belongs.
ssize_t NetLine::receive() {
  if (!tls_ && left_ > static_cast<int64_t>(kBuffer) / 2 && target_.to != nullptr) {
    // The payload goes to its destination, what follows it to the buffer.
    iovec parts[2] = {{target_.to, static_cast<size_t>(left_)}, {buffer_.get(), kBuffer}};
    const ssize_t got = readv(fd_.get(), parts, 2);
    if (got <= 0) return got;
    const int64_t mine = std::min<int64_t>(got, left_);
    target_.to += mine;
    left_ -= mine;
    if (left_ == 0) end_payload();
    if (got > mine) consume({buffer_.get(), static_cast<size_t>(got - mine)});
    return got;
  }
  const ssize_t got = recv(fd_.get(), buffer_.get(), kBuffer, 0);
  if (got <= 0) return got;
  const std::string_view bytes(buffer_.get(), static_cast<size_t>(got));
  if (tls_) {
    decrypt(bytes);
  } else {
    consume(bytes);
  }
  return got;
}

void NetLine::decrypt(std::string_view bytes) {
  tls_->push(bytes);  // a copy: the buffer is free
  try {
    for (;;) {
      // No more than what is being read, so that payloads go straight to their places.
      const bool to_its_place = left_ > 0 && target_.to != nullptr;
      char* const to = to_its_place ? target_.to : buffer_.get();
      const size_t room = left_ == 0     ? NetFrame::kBytes - head_.size()
                          : to_its_place ? static_cast<size_t>(left_)
                                         : std::min<size_t>(kBuffer, static_cast<size_t>(left_));
      const size_t got = tls_->read(to, room);
      if (got == 0) return;
      if (!to_its_place) {
        consume({to, got});
        continue;
      }
      target_.to += got;
      left_ -= static_cast<int64_t>(got);
      if (left_ == 0) end_payload();
    }
  } catch (const TlsError& error) {
    throw Error(
        fmt::format("sent what cannot be decrypted: something on the path to it changes data ({})",
                    error.what()));
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
    if (got == 0 || !would_block(errno)) return false;
    break;
  }
  int unsent = 0;
  return has_output() || (ioctl(fd_.get(), SIOCOUTQ, &unsent) == 0 && unsent > 0);
}

}  // namespace lockstep::comm
