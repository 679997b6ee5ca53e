// How processes of one host pass each other file descriptors: over sockets in the abstract name
// space, which need neither the same user, nor the same user or pid namespace, nor /proc.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "core/files/fd.h"

namespace lockstep::comm {

// Random bytes that identify a descriptor and cannot be guessed.
using Cookie = std::array<uint64_t, 2>;
Cookie new_cookie();

class Door {
 public:
  // This process's.
  static Door& own();

  // What others send to; empty where the kernel gives this process no such socket.
  const std::string& address() const { return address_; }
  // Puts `fd` with `cookie` where the process with the door at `address` finds it. Nothing, or why
  // not.
  static std::optional<std::string> hand_over(const std::string& address, const Cookie& cookie,
                                              int fd);
  // What came with `cookie`, if it has. What came with others stays, the latest of it.
  std::optional<Fd> take(const Cookie& cookie);

 private:
  Door();
  bool receive();

  Fd socket_;
  std::string address_;
  std::mutex mutex_;
  std::deque<std::pair<Cookie, Fd>> came_;  // in the order in which they came
};

}  // namespace lockstep::comm
