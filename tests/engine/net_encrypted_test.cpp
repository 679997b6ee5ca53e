// What somebody on the path between two ranks sees of them, and can do to them.
#include <gmock/gmock.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/net/net.h"
#include "comm/net/ops.h"
#include "core/files/fd.h"
#include "core/security/tls.h"
#include "engine/net_ranks.h"
#include "lockstep/core/error.h"
#include "support/loopback.h"

namespace lockstep::comm {
namespace {

using testing::HasSubstr;

// Passes on what one caller and the one it calls say to each other.
class Relay {
 public:
  explicit Relay(int port) : to_(port) {
    listening_.listen();
    thread_ = std::thread([this] { serve(); });
  }
  ~Relay() {
    stopping_ = true;
    thread_.join();
  }
  int port() const { return listening_.port; }
  std::string seen() const {
    const std::lock_guard lock(mutex_);
    return seen_;
  }
  // Of the next bytes that come from there one bit.
  void flip_from_caller() { flip_[0] = true; }
  void flip_from_called() { flip_[1] = true; }

 private:
  static bool send_all(int fd, const std::string& bytes) {
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t sent = send(fd, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
      if (sent <= 0) return false;
      at += static_cast<size_t>(sent);
    }
    return true;
  }

  bool await(std::array<pollfd, 2>& fds, nfds_t count) const {
    while (poll(fds.data(), count, 20) <= 0) {
      if (stopping_) return false;
    }
    return true;
  }

  void serve() {
    std::array<pollfd, 2> fds = {{{listening_.fd.get(), POLLIN, 0}, {}}};
    if (!await(fds, 1)) return;
    const Fd caller(accept4(listening_.fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const Fd called(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_in address = test::loopback(to_);
    if (connect(called.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      return;
    }
    fds = {{{caller.get(), POLLIN, 0}, {called.get(), POLLIN, 0}}};
    std::string bytes;
    while (await(fds, 2)) {
      for (size_t from = 0; from < 2; ++from) {
        if (fds[from].revents == 0) continue;
        bytes.resize(64 << 10);
        const ssize_t got = recv(fds[from].fd, bytes.data(), bytes.size(), 0);
        if (got <= 0) return;
        bytes.resize(static_cast<size_t>(got));
        {
          const std::lock_guard lock(mutex_);
          seen_ += bytes;
        }
        if (flip_[from].exchange(false)) bytes.back() ^= 4;
        if (!send_all(fds[1 - from].fd, bytes)) return;
      }
    }
  }

  const int to_;
  test::LoopbackSocket listening_;
  mutable std::mutex mutex_;
  std::string seen_;
  std::array<std::atomic<bool>, 2> flip_ = {false, false};
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

// Two ranks, of which rank 1 reaches rank 0 through a relay.
struct Watched {
  explicit Watched(NetPayload payload)
      : ranks(2, payload, [this](std::vector<std::string> addresses) {
          if (!relay) {
            const size_t space = addresses[0].find(' ');
            relay.emplace(std::atoi(addresses[0].c_str() + space + 1));
          }
          addresses[0] = "127.0.0.1 " + std::to_string(relay->port());
          return addresses;
        }) {}
  std::optional<Relay> relay;
  Ranks ranks;
};

std::string long_message() {
  std::string text;
  while (text.size() < 300'000) text += "a gradient of a secret model ";
  return text;
}

TEST(NetEncrypted, ARecorderInTheMiddleReadsNothing) {
  const std::string sent = long_message(), word = "a gradient of a secret";
  for (const NetPayload payload : {NetPayload::Plain, NetPayload::Encrypted}) {
    Watched watched(payload);
    watched.ranks.run([&](NetGroup& group, int rank) {
      Caller caller(group);
      // Short messages, which go at once, and long ones, from either side.
      for (const size_t size : {size_t{100}, sent.size()}) {
        for (const int root : {0, 1}) {
          std::string data = rank == root ? sent.substr(0, size) : std::string(size, '.');
          caller.call([&](const NetPort& port) {
            net::broadcast(port, root, {data.data(), static_cast<int64_t>(size)});
          });
          EXPECT_EQ(data, sent.substr(0, size));
        }
      }
    });
    const std::string seen = watched.relay->seen();
    EXPECT_GT(seen.size(), 2 * sent.size());
    // The control: this is where it would be.
    EXPECT_EQ(seen.find(word) == std::string::npos, payload == NetPayload::Encrypted);
  }
}

TEST(NetEncrypted, AFlippedBitIsAnErrorThatNamesThePeer) {
  const std::string sent = long_message();
  for (const int root : {0, 1}) {
    Watched watched(NetPayload::Encrypted);
    std::string data[2] = {sent, sent};
    std::barrier<> all_are_connected(2);
    watched.ranks.run([&](NetGroup& group, int rank) {
      Caller caller(group);
      caller.call([](const NetPort& port) { net::barrier(port); });
      all_are_connected.arrive_and_wait();
      if (rank == root) {
        if (root == 0) watched.relay->flip_from_called();
        if (root == 1) watched.relay->flip_from_caller();
      } else {
        data[rank].assign(sent.size(), '.');
      }
      const auto job = caller.start([&](const NetPort& port) {
        net::broadcast(port, root, {data[rank].data(), static_cast<int64_t>(sent.size())});
      });
      EXPECT_TRUE(group.wait(*job, Net::Clock::now() + std::chrono::seconds(60)));
      if (rank == root && !job->failure()) return;  // all was sent when the other found it
      ASSERT_TRUE(job->failure());
      EXPECT_EQ(job->failure()->peer, 1 - rank);
      if (rank != root) {
        EXPECT_THAT(job->failure()->what, HasSubstr("sent what cannot be decrypted"));
        EXPECT_NE(data[rank], sent);
      }
    });
  }
}

// Who wants the payload encrypted talks to nobody who does not, whatever somebody in the middle
// says: the word is within the handshake.
TEST(NetEncrypted, PlainAndEncryptedDoNotMeet) {
  for (const bool caller_encrypts : {false, true}) {
    const auto payload_of = [](bool encrypts) {
      return encrypts ? NetPayload::Encrypted : NetPayload::Plain;
    };
    NetHandshake caller = NetHandshake::caller(key_of(1), 1, 0, payload_of(caller_encrypts));
    NetHandshake called = NetHandshake::called(key_of(1), 0, payload_of(!caller_encrypts));
    const auto pass = [](std::string bytes, NetHandshake& to) {
      while (!bytes.empty() && !to.is_over()) {
        const size_t count = std::min(bytes.size(), to.wants());
        to.feed(bytes.substr(0, count));
        bytes.erase(0, count);
      }
    };
    pass(caller.take_output(), called);
    pass(called.take_output(), caller);
    EXPECT_THROW(pass(caller.take_output(), called), Error);
    EXPECT_FALSE(called.is_over());
  }
}

TEST(NetEncrypted, AKeyIsRenewedInTheMiddleOfTheStream) {
  Tls client(Tls::Role::Client, key_of(1)), server(Tls::Role::Server, key_of(1));
  while (!client.is_open() || !server.is_open()) {
    EXPECT_EQ(server.feed(client.take_output()), "");
    EXPECT_EQ(client.feed(server.take_output()), "");
  }
  const std::string sent = long_message();
  for (int i = 0; i < 3; ++i) {
    client.write(sent);
    client.renew_key();
    client.write("and more");
    server.push(client.take_output());
    std::string got(sent.size() + 8, '.');
    EXPECT_EQ(server.read(got.data(), got.size()), got.size());
    EXPECT_EQ(got, sent + "and more");
    // The other way is as it was.
    server.write("yes");
    EXPECT_EQ(client.feed(server.take_output()), "yes");
  }
}

}  // namespace
}  // namespace lockstep::comm
