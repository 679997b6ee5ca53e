// A secret that the processes of a job on several hosts share without having been given one: one of
// them makes it, and hands it out to those who show that they are of the same user and job.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/files/fd.h"

namespace lockstep {

// A length of 4 bytes (little-endian) and a credential of MUNGE each way. The request's has a name
// of this protocol, the job and 32 random bytes as hexadecimal digits, a line each; the answer's
// has these and the secret. Who is not of this user, or asks for another job, gets no answer.
class SecretServer {
 public:
  // In the place of a secret, on a host without MUNGE.
  struct None {};

  // Serves in a thread of its own, at `port` of every interface. Throws Error when it cannot.
  SecretServer(uint16_t port, std::string job, std::string secret);
  // Answers `none`, which is no credential, to all who ask: they would wait for a secret.
  SecretServer(uint16_t port, None none);
  ~SecretServer();
  SecretServer(const SecretServer&) = delete;
  SecretServer& operator=(const SecretServer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  struct Client {
    Fd fd = {};
    Clock::time_point until = {};
    std::string in = {}, out = {};
  };

  void listen(uint16_t port);
  void serve();
  void accept_all(const Fd& listening);
  bool goes_on(Client& client);
  std::string answer(const std::string& credential) const;

  const std::string job_, secret_;  // both empty: there is none
  std::vector<Fd> listening_;
  const Fd stop_;
  std::list<Client> clients_;
  std::thread thread_;
};

// The secret that a SecretServer at the host hands out. Blocks, and asks again until there is an
// answer; throws CommError, with the last reason, when there was none within `timeout`, and at once
// when the answer is that there is no secret.
std::string ask_for_secret(const std::string& host, uint16_t port, std::string_view job,
                           std::chrono::milliseconds timeout);

}  // namespace lockstep
