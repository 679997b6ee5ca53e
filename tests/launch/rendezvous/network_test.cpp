// Connections of many launchers with one, over real sockets.
#include "launch/rendezvous/network/network.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace lockstep::launch::testing {
namespace {

using namespace std::chrono_literals;

class Party : public Network::Handler {
 public:
  explicit Party(Fd socket) : network(std::move(socket), keys(), 30s, *this) {}

  ConnectionId on_accept() override {
    links.insert(++last);
    return last;
  }
  void on_connect(ConnectionId link) override { links.insert(link); }
  void on_message(ConnectionId link, const MessagePtr& message) override {
    heard[link] = std::get<Ping>(*message).number;
  }
  void on_close(ConnectionId link, bool) override { links.erase(link); }
  void on_refused_connection(const std::string& text) override { ADD_FAILURE() << text; }
  void on_disagreement(const std::string& text) override { ADD_FAILURE() << text; }

  static Keys keys() { return Keys::of(Token("0123456789abcdef"), "job"); }

  Network network;
  ConnectionId last = 0;
  std::set<ConnectionId> links;
  std::map<ConnectionId, uint64_t> heard;
};

// Until `done`, as a launcher's loop does, of both; false when nothing happens any more.
template <class Done>
bool run(Party& a, Party& b, Done done) {
  while (!done()) {
    std::vector<pollfd> events;
    a.network.await(events);
    b.network.await(events);
    if (poll(events.data(), events.size(), 30'000) <= 0) return false;
    a.network.pump();
    b.network.pump();
  }
  return true;
}

// More than epoll hands over at once.
TEST(Network, ManyLaunchersTalkToOne) {
  constexpr size_t kHosts = 300, kAtATime = 100;
  auto socket = listen_at(Address::loopback(0), SOCK_NONBLOCK);
  ASSERT_TRUE(socket);
  const Address where = local_address(socket->get());
  Party coordinator(std::move(*socket)), hosts{Fd()};
  while (hosts.links.size() < kHosts) {
    const size_t before = hosts.links.size();
    for (size_t i = 0; i < kAtATime; ++i) {
      hosts.network.dial(++hosts.last, "the coordinator", {where});
    }
    ASSERT_TRUE(run(coordinator, hosts, [&] {
      return hosts.links.size() == before + kAtATime &&
             coordinator.links.size() == before + kAtATime;
    }));
  }
  const auto to_all = [](Party& from, uint64_t number) {
    const auto message = std::make_shared<const Message>(Ping{number});
    for (const ConnectionId link : from.links) from.network.send(link, message);
  };
  const auto all_heard = [](const Party& party, uint64_t number) {
    return party.heard.size() == kHosts &&
           std::ranges::all_of(party.heard, [=](auto& one) { return one.second == number; });
  };
  for (uint64_t number = 1; number <= 3; ++number) {
    to_all(hosts, number);
    to_all(coordinator, number);
    ASSERT_TRUE(run(coordinator, hosts,
                    [&] { return all_heard(coordinator, number) && all_heard(hosts, number); }));
  }
  // What was said before a launcher hangs up arrives.
  to_all(coordinator, 4);
  for (const ConnectionId link : coordinator.links) coordinator.network.hang_up(link);
  ASSERT_TRUE(run(coordinator, hosts, [&] { return hosts.links.empty(); }));
  EXPECT_TRUE(all_heard(hosts, 4));
}

// A launcher that may open no more descriptors waits until it may again, without turning round.
TEST(Network, WithoutADescriptorForThemNewLaunchersWait) {
  auto socket = listen_at(Address::loopback(0), SOCK_NONBLOCK);
  ASSERT_TRUE(socket);
  const Address where = local_address(socket->get());
  Party coordinator(std::move(*socket)), hosts{Fd()};
  hosts.network.dial(++hosts.last, "the coordinator", {where});
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 3;  // the standard streams
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  std::vector<pollfd> events;
  coordinator.network.await(events);
  const int knocked = poll(events.data(), events.size(), 30'000);
  coordinator.network.pump();
  const int again = poll(events.data(), events.size(), 0);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(knocked, 1);
  EXPECT_EQ(again, 0) << "it would look at once, and again, for as long as there is none";
  const auto deadline = coordinator.network.deadline();
  ASSERT_TRUE(deadline);
  EXPECT_LE(*deadline, Network::Clock::now() + 1s);
  while (Network::Clock::now() < *deadline) poll(nullptr, 0, 1);
  coordinator.network.pump();
  EXPECT_TRUE(run(coordinator, hosts,
                  [&] { return coordinator.links.size() == 1 && hosts.links.size() == 1; }));
}

TEST(Network, WhereNobodyListensIsTold) {
  struct Refused : Party {
    using Party::Party;
    void on_close(ConnectionId link, bool refused) override { closed = refused ? link : 0; }
    ConnectionId closed = 0;
  } caller{Fd()};
  Party other{Fd()};
  // Bound, so that nobody else takes the port, and not listening.
  const Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const Address any = Address::loopback(0);
  ASSERT_EQ(bind(socket.get(), any.generic(), any.length), 0);
  const Address where = local_address(socket.get());
  caller.network.dial(7, "the coordinator", {where});
  ASSERT_TRUE(run(caller, other, [&] { return caller.closed != 0; }));
  EXPECT_EQ(caller.closed, 7);
}

TEST(Network, WhatAStrangerDoesAgainAndAgainIsSaidOnceInAWhile) {
  struct Listening : Party {
    using Party::Party;
    void on_refused_connection(const std::string& text) override { lines.push_back(text); }
    std::vector<std::string> lines;
  };
  auto socket = listen_at(Address::loopback(0), SOCK_NONBLOCK);
  ASSERT_TRUE(socket);
  const Address where = local_address(socket->get());
  Listening coordinator(std::move(*socket));
  // Until the coordinator has closed the connection.
  const auto speak = [&](std::string_view text) {
    const Fd stranger(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(stranger.get(), where.generic(), where.length), 0);
    ASSERT_EQ(send(stranger.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    char byte;
    while (recv(stranger.get(), &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN) {
      std::vector<pollfd> events;
      coordinator.network.await(events);
      poll(events.data(), events.size(), 10);
      coordinator.network.pump();
    }
  };
  speak("GET / HTTP/1.0");
  EXPECT_EQ(coordinator.lines.size(), 1U);
  speak("GET / HTTP/1.0");
  ASSERT_TRUE(coordinator.network.deadline());
  EXPECT_GT(*coordinator.network.deadline(), Network::Clock::now() + 10s);
  speak("POST / HTTP/1.0");  // something else
  ASSERT_TRUE(coordinator.network.deadline());
  EXPECT_LT(*coordinator.network.deadline(), Network::Clock::now() + 2s);
}

// A name server may keep a launcher waiting that has ranks to look after.
TEST(Network, WhoWasReachedIsReachedAgainWithoutItsName) {
  auto socket = listen_at(Address::loopback(0), SOCK_NONBLOCK);
  ASSERT_TRUE(socket);
  const Address where = local_address(socket->get());
  Party coordinator(std::move(*socket)), host{Fd()};
  host.network.dial(++host.last, "the coordinator", {where});
  ASSERT_TRUE(run(coordinator, host,
                  [&] { return host.links.size() == 1 && coordinator.links.size() == 1; }));
  host.network.dial(++host.last, "the coordinator", {});
  EXPECT_TRUE(run(coordinator, host,
                  [&] { return host.links.size() == 2 && coordinator.links.size() == 2; }));
}

// Its output may take a while after that.
TEST(Network, ALauncherThatEndsListensNoMore) {
  auto socket = listen_at(Address::loopback(0), SOCK_NONBLOCK);
  ASSERT_TRUE(socket);
  const Address where = local_address(socket->get());
  Party ending(std::move(*socket));
  ending.network.finish(0s);
  const Fd next(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_NE(connect(next.get(), where.generic(), where.length), 0);
}

}  // namespace
}  // namespace lockstep::launch::testing
