// What it costs to bring many hosts together: the launchers' own nodes, with the time that
// messages, handshakes and wires take as measured (docs/log.md). Prints a table; what is checked
// are numbers of messages, which no machine changes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <queue>
#include <unordered_map>

#include "launch/rendezvous/network/codec.h"
#include "launch/rendezvous/node/node.h"

namespace lockstep::launch::testing {
namespace {

using std::chrono::microseconds;

constexpr Time kLatency = microseconds(100);    // of the network, one way
constexpr Time kHandshake = microseconds(100);  // of either side's processor, sockets included
constexpr Time kMessage = microseconds(10);     // to send one, and to receive one
constexpr double kNanosecondsPerByte = 4;       // HMAC on either side; 10 Gbit/s take less
constexpr size_t kOverhead = 20;                // of a message, in bytes

class Crowd {
 public:
  explicit Crowd(int hosts) : hosts_(hosts) {
    for (int i = 0; i < hosts; ++i) {
      NodeOptions options;
      options.self = {.launcher = static_cast<uint64_t>(i) + 1,
                      .host = fmt::format("node{:05}", i),
                      .ranks = 8,
                      .address = std::to_string(i),
                      .job_spec = {hosts, hosts, 0}};
      options.timing.lease = std::chrono::hours(1);  // no heartbeats: they are counted by hand
      options.timing.interval = std::chrono::minutes(20);
      options.timing.survivors = Time(0);
      options.coordinator = "0";
      options.is_coordinator = i == 0;
      hosts_[i].node = std::make_unique<Node>(options, Time(0));
      act(i);
    }
  }

  // Until every host has been told to start its ranks.
  void start() {
    run([this] { return launched_ == hosts_.size(); });
    started = now_;
    start_messages = messages_;
    start_bytes = bytes_;
  }

  // From a failure on the host that came last until every host has been told to stop.
  void fail() {
    const int last = static_cast<int>(hosts_.size()) - 1;
    hosts_[last].node->rank_failed(
        {.kind = Failure::Kind::Killed, .rank = 8 * last, .status = 137, .what = "a rank failed"},
        now_);
    act(last);
    run([this] { return halted_ == hosts_.size(); });
    told = now_ - started;
  }

  Time started{}, told{};
  size_t start_messages = 0, start_bytes = 0;

 private:
  struct Event {
    Time time;
    uint64_t number;
    int host;
    std::function<void(Node&, Time)> what;
    Time cost;
    bool operator<(const Event& other) const {
      return std::tie(time, number) > std::tie(other.time, other.number);
    }
  };

  struct Host {
    std::unique_ptr<Node> node;
    Time free{};  // its processor
    std::unordered_map<ConnectionId, std::pair<int, ConnectionId>> peers;
    Time tick = Time::max();
    std::deque<Event> inbox;
  };
  void at(Time time, int host, Time cost, std::function<void(Node&, Time)> what) {
    events_.push({time, ++numbers_, host, std::move(what), cost});
  }

  // A processor does one thing after another, in the order in which they came.
  template <class Done>
  void run(Done done) {
    while (!done()) {
      ASSERT_FALSE(events_.empty());
      Event event = events_.top();
      events_.pop();
      Host& host = hosts_[event.host];
      if (event.what) {
        host.inbox.push_back(std::move(event));
        if (host.inbox.size() == 1) wake(host.inbox.front().host, host.inbox.front().time);
        continue;
      }
      Event next = std::move(host.inbox.front());
      host.inbox.pop_front();
      host.free = now_ = event.time + next.cost;
      next.what(*host.node, now_);
      act(next.host);
      if (!host.inbox.empty()) wake(next.host, now_);
    }
  }

  void wake(int host, Time time) {
    events_.push({std::max(time, hosts_[host].free), ++numbers_, host, nullptr, Time(0)});
  }

  void act(int index) {
    Host& host = hosts_[index];
    for (const Action& action : host.node->take_actions()) {
      if (const auto* dial = std::get_if<Dial>(&action)) {
        connect(index, dial->link, std::stoi(dial->address));
      } else if (const auto* send = std::get_if<Send>(&action)) {
        deliver(index, *send);
      } else if (const auto* hang = std::get_if<Hang>(&action)) {
        const auto peer = host.peers.extract(hang->link);
        if (peer.empty()) continue;
        const auto [other, link] = peer.mapped();
        hosts_[other].peers.erase(link);
        at(host.free + kLatency, other, kMessage,
           [link = link](Node& node, Time now) { node.closed(link, false, now); });
      } else if (std::holds_alternative<Launch>(action)) {
        ++launched_;
      } else if (std::holds_alternative<Halt>(action)) {
        ++halted_;
      }
    }
    if (index == 0) return;  // it waits for nothing but others
    const Time tick = std::max(host.free, host.node->deadline(host.free));
    if (tick < host.tick) {
      host.tick = tick;
      at(tick, index, Time(0), [this, index](Node& node, Time now) {
        hosts_[index].tick = Time::max();
        node.tick(now);
      });
    }
  }

  void connect(int from, ConnectionId link, int to) {
    at(std::max(now_, hosts_[from].free) + 2 * kLatency, to, kHandshake,
       [=, this](Node& node, Time now) {
         const ConnectionId other = node.accept(now);
         hosts_[to].peers[other] = {from, link};
         hosts_[from].peers[link] = {to, other};
         at(now + 2 * kLatency, from, kHandshake,
            [link](Node& caller, Time then) { caller.connected(link, then); });
       });
  }

  size_t bytes_of(const MessagePtr& message) {
    if (message != sized_) {
      sized_ = message;
      size_ = encode(*message).size() + kOverhead;
    }
    return size_;
  }

  void deliver(int index, const Send& send) {
    Host& host = hosts_[index];
    const auto peer = host.peers.find(send.link);
    if (peer == host.peers.end()) return;
    const auto [other, link] = peer->second;
    const size_t bytes = bytes_of(send.message);
    const Time work =
        kMessage + Time(static_cast<int64_t>(static_cast<double>(bytes) * kNanosecondsPerByte));
    host.free = std::max(host.free, now_) + work;
    ++messages_;
    bytes_ += bytes;
    at(host.free + kLatency, other, work,
       [link = link, message = send.message](Node& node, Time now) {
         node.receive(link, message, now);
       });
  }

  std::vector<Host> hosts_;
  std::priority_queue<Event> events_;
  uint64_t numbers_ = 0;
  Time now_{};
  size_t launched_ = 0, halted_ = 0, messages_ = 0, bytes_ = 0;
  MessagePtr sized_;
  size_t size_ = 0;
};

double seconds_of(Time time) { return std::chrono::duration<double>(time).count(); }

TEST(Scale, AStartTakesFourMessagesAHost) {
  fmt::print("  hosts | started after, messages of the start | a failure is known after\n");
  for (const int hosts : {10, 100, 1'000, 10'000}) {
    Crowd crowd(hosts);
    crowd.start();
    crowd.fail();
    fmt::print("{:7} | {:7.3f} s {:7} messages {:8.2f} MB | {:6.1f} ms\n", hosts,
               seconds_of(crowd.started), crowd.start_messages,
               static_cast<double>(crowd.start_bytes) / 1e6, 1e3 * seconds_of(crowd.told));
    // Join, Welcome, Ready and the order to start, of each but the coordinator's own.
    EXPECT_EQ(crowd.start_messages, static_cast<size_t>(4 * (hosts - 1)));
  }
}

}  // namespace
}  // namespace lockstep::launch::testing
