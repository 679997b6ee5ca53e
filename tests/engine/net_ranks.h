// Ranks over TCP, each a thread of this process with a net of its own.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "comm/net/net.h"

namespace lockstep::comm {

inline Digest key_of(uint8_t byte) {
  Digest key;
  key.fill(byte);
  return key;
}

class Ranks {
 public:
  // From the ranks' own addresses to those that the others call.
  using Route = std::function<std::vector<std::string>(std::vector<std::string>)>;

  explicit Ranks(int size, NetPayload payload = NetPayload::Plain, const Route& route = {}) {
    std::vector<std::string> addresses;
    for (int rank = 0; rank < size; ++rank) {
      nets_.push_back(
          std::make_shared<Net>(rank, "127.0.0.1", key_of(1), NetOptions{.payload = payload}));
      addresses.push_back(nets_.back()->own_address());
    }
    for (int rank = 0; rank < size; ++rank) net(rank)->meet(route ? route(addresses) : addresses);
  }
  int size() const { return static_cast<int>(nets_.size()); }
  std::shared_ptr<Net>& net(int rank) { return nets_[static_cast<size_t>(rank)]; }
  int port(int rank) {
    const std::string& text = net(rank)->own_address();
    return std::atoi(text.c_str() + text.find(' ') + 1);
  }

  // Runs `body` on all ranks at once, with a group of them.
  void run(const std::function<void(NetGroup&, int)>& body) {
    ++groups_;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) {
      threads.emplace_back([&, rank] {
        std::vector<int> members(static_cast<size_t>(size()));
        std::iota(members.begin(), members.end(), 0);
        NetGroup group(net(rank), groups_, rank, members);
        body(group, rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  std::vector<std::shared_ptr<Net>> nets_;
  uint64_t groups_ = 0;
};

// Calls of one rank, one after another.
class Caller {
 public:
  explicit Caller(NetGroup& group, uint32_t calls_before = 0)
      : group_(group), number_(calls_before) {}
  std::shared_ptr<NetJob> start(const std::function<void(const NetPort&)>& begin,
                                uint32_t checksum = 7) {
    return group_.start({.number = ++number_, .checksum = checksum}, begin);
  }
  void finish(const NetJob& job) {
    ASSERT_TRUE(group_.wait(job, Net::Clock::now() + std::chrono::seconds(60)));
    ASSERT_FALSE(job.failure()) << job.failure()->what;
  }
  void call(const std::function<void(const NetPort&)>& begin) { finish(*start(begin)); }
  std::string failure_of(const NetJob& job) {
    EXPECT_TRUE(group_.wait(job, Net::Clock::now() + std::chrono::seconds(60)));
    return job.failure() ? job.failure()->what : "nothing";
  }

 private:
  NetGroup& group_;
  uint32_t number_;
};

}  // namespace lockstep::comm
