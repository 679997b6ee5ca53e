// A secret that the processes of a job on one host share without having been given one: the kernel
// says which user is at the other end of a Unix socket.
#pragma once

#include <chrono>
#include <string>
#include <thread>

#include "core/files/fd.h"

namespace lockstep {

// Hands the secret out to processes of this user, in a thread of its own.
class LocalSecretServer {
 public:
  // `job`: of this user's on this host. Throws Error where another process serves it already, or
  // there are no such sockets.
  LocalSecretServer(const std::string& job, std::string secret);
  ~LocalSecretServer();
  LocalSecretServer(const LocalSecretServer&) = delete;
  LocalSecretServer& operator=(const LocalSecretServer&) = delete;

 private:
  void serve();

  const std::string secret_;
  const Fd listening_, stop_;
  std::thread thread_;
};

// The secret that this user's LocalSecretServer hands out. Blocks until there is one; throws
// CommError when there was none within `timeout`, and at once when another user's process is there.
std::string ask_for_local_secret(const std::string& job, std::chrono::milliseconds timeout);

}  // namespace lockstep
