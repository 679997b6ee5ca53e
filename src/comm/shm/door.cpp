#include "comm/shm/door.h"

#include <fmt/format.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/network/unix_address.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// Descriptors that came and were not taken; with more than that, the oldest are other programs'.
constexpr size_t kMostKept = 256;
// How long sending to a full socket is tried again.
constexpr std::chrono::seconds kFull{5};

union ControlBytes {
  char bytes[CMSG_SPACE(sizeof(int))];
  cmsghdr align;
};

}  // namespace

Cookie new_cookie() {
  Cookie cookie;
  if (getrandom(cookie.data(), sizeof cookie, 0) != sizeof cookie)
    throw CommError(fmt::format("[shm] no random numbers: {}", std::strerror(errno)));
  return cookie;
}

Door& Door::own() {
  static std::mutex mutex;
  static std::map<pid_t, std::unique_ptr<Door>> doors;  // a forked child needs another
  const std::lock_guard lock(mutex);
  auto& door = doors[getpid()];
  if (!door) door.reset(new Door);
  return *door;
}

Door::Door() : socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  if (!socket_) return;
  const Cookie name = new_cookie();
  const std::string wanted = fmt::format("lockstep-{:016x}{:016x}", name[0], name[1]);
  const auto [address, length] = abstract_address(wanted);
  if (bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0)
    address_ = wanted;
}

std::optional<std::string> Door::hand_over(const std::string& address, const Cookie& cookie,
                                           int fd) {
  if (address.empty()) return "it has no socket";
  const Fd own(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!own) return fmt::format("no socket: {}", std::strerror(errno));
  auto [to, length] = abstract_address(address);
  Cookie said = cookie;
  iovec data{said.data(), sizeof said};
  ControlBytes control{};
  msghdr message{};
  message.msg_name = &to;
  message.msg_namelen = length;
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof control.bytes;
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  const auto until = std::chrono::steady_clock::now() + kFull;
  while (sendmsg(own.get(), &message, MSG_NOSIGNAL) < 0) {
    const bool full = errno == EAGAIN || errno == EINTR || errno == ETOOMANYREFS;
    if (!full || std::chrono::steady_clock::now() >= until) return std::strerror(errno);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return std::nullopt;
}

// One more message; false when there is none.
bool Door::receive() {
  Cookie cookie{};
  iovec data{cookie.data(), sizeof cookie};
  ControlBytes control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof control.bytes;
  ssize_t length = 0;
  do {
    length = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  } while (length < 0 && errno == EINTR);
  if (length < 0) return false;
  std::vector<Fd> all;  // as many as the sender has put into the message
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + sizeof(int) <= header->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(header) + at, sizeof number);
      all.emplace_back(number);
    }
  }
  const bool is_cut = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  if (length != sizeof cookie || is_cut || all.size() != 1) return true;
  if (came_.size() == kMostKept) came_.pop_front();
  came_.emplace_back(cookie, std::move(all.front()));
  return true;
}

std::optional<Fd> Door::take(const Cookie& cookie) {
  const std::lock_guard lock(mutex_);
  for (;;) {
    const auto found = std::find_if(came_.begin(), came_.end(),
                                    [&](const auto& one) { return one.first == cookie; });
    if (found != came_.end()) {
      Fd fd = std::move(found->second);
      came_.erase(found);
      return fd;
    }
    if (!socket_ || !receive()) return std::nullopt;
  }
}

}  // namespace lockstep::comm
