// The TCP connections of this process to the other ranks of its world: made when they are needed,
// one to a rank, for all groups; and the one thread that moves them on. No torch.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "comm/net/box.h"
#include "comm/net/handshake.h"
#include "core/files/fd.h"

namespace lockstep::comm {

class NetGroup;

struct NetOptions {
  // The same on all ranks.
  NetPayload payload = NetPayload::Plain;
  // Of the longest wait: a connection on which nothing is acknowledged lasts for as long.
  std::chrono::milliseconds deadline{0};
  // Says when this process is about to be stopped. Any thread may call it.
  std::function<bool()> is_job_over = {};
};

// The messages of one call, while its group begins it, and in what it calls then.
class NetPort {
 public:
  using Then = NetBox::Then;

  NetPort(NetBox& box, NetJob& job) : box_(&box), job_(&job) {}
  int rank() const { return box_->rank(); }
  int size() const { return box_->size(); }
  // Any number of bytes; the two ranks number their messages in one direction in the same way by
  // `part`, of which each takes parts_of(bytes). The memory stays untouched until `then`, which may
  // send and receive more.
  void send(int peer, uint32_t part, const char* data, int64_t bytes, Then then = {}) const;
  void recv(int peer, uint32_t part, char* data, int64_t bytes, Then then = {}) const;
  static uint32_t parts_of(int64_t bytes);

 private:
  NetBox* box_;
  NetJob* job_;
};

class Net final : public NetSink, public NetWires {
 public:
  using Clock = std::chrono::steady_clock;

  // Listens on a free port of `address`, which is numeric, as `rank` of the world, and serves only
  // those who know `key`. Throws CommError.
  Net(int rank, const std::string& address, const Digest& key, NetOptions options = {});
  // What has been sent is delivered first, for two seconds at most (a tenth after a group was
  // aborted here, or once the job is over); it waits for nothing else.
  ~Net() override;
  Net(const Net&) = delete;
  Net& operator=(const Net&) = delete;

  // "10.0.0.1 41234"
  const std::string& own_address() const { return own_address_; }
  // Of all ranks, before the first group.
  void meet(std::vector<std::string> addresses);
  // "rank 1 gives no answer at 10.0.0.2 41234": the peers that have not accepted this rank's
  // connection yet; empty when there are none.
  std::string unanswered() const;
  // "what rank 0 has sent to rank 1 at 10.0.0.2 41234 ...": the connections on which data goes out
  // again and again and is not acknowledged; empty when there are none.
  std::string unacknowledged() const;
  // For tests: what this process has open.
  size_t connections() const;

 private:
  friend class NetGroup;
  enum class State { Idle, Connecting, Shaking, Open, Gone };
  struct Shaking {
    Fd fd;
    NetHandshake handshake;
    std::string out = {};
    uint64_t number = 0;
  };
  struct Peer {
    explicit Peer(int rank, NetSink& sink) : line(rank, sink) {}
    NetLine line;
    State state = State::Idle;
    Fd connecting = {};
    std::optional<Shaking> shaking = {};
    std::string gone = {};
    bool watches_output = false;
    int tries = 0;
    // When to try again, or to take the peer for gone.
    std::optional<Clock::time_point> timer = {};
  };

  NetTarget arrived(int peer, const NetFrame& frame) override;
  NetLine& line_to(int peer) override;
  NetLine& line_if_any(int peer) override;
  std::optional<std::string> gone(int peer) const override;
  void forget(const NetJob* job) override;
  void changed() override { changed_ = true; }

  NetBox& box(uint64_t id);
  void serve();
  void handle(uint64_t who, uint32_t events);
  std::optional<Clock::time_point> next_timer() const;
  void run_timers();
  bool watch(int fd, uint32_t events, uint64_t who);
  void accept_all();
  void step_accepted(uint64_t number);
  void connect(int peer);
  void step_peer(int peer, uint32_t events);
  bool step(Shaking& shaking);
  void open(int peer, Shaking shaking);
  void lose(int peer, const std::string& why);
  void listen_no_longer_than_needed();
  void flush_all();
  void linger();

  const int rank_;
  const Digest key_;
  const NetOptions options_;
  std::string own_address_;
  Fd listening_;
  const Fd stop_, events_;
  const size_t most_accepted_;
  mutable std::mutex mutex_;
  std::condition_variable over_;
  std::vector<std::string> addresses_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::map<uint64_t, std::unique_ptr<NetBox>> boxes_;
  std::list<Shaking> accepted_;  // connected, but not known to be ranks yet
  uint64_t next_accepted_ = 0;
  std::set<int> dirty_;
  bool changed_ = false;
  bool stopping_ = false;
  bool has_failed_ = false;  // a group was aborted here
  std::optional<Clock::time_point> listen_again_;
  std::thread thread_;
};

// One group's interface to the net. Any thread may call it.
class NetGroup {
 public:
  // `id` is the same on all members and no other group's; `members` are ranks of the world.
  NetGroup(std::shared_ptr<Net> net, uint64_t id, int rank, std::vector<int> members);
  ~NetGroup();
  NetGroup(const NetGroup&) = delete;
  NetGroup& operator=(const NetGroup&) = delete;

  // `begin` sends and receives what the call begins with; all else follows in the net's thread.
  std::shared_ptr<NetJob> start(const NetCallName& name,
                                const std::function<void(const NetPort&)>& begin);
  // As NetBox::skip().
  void skip(const NetCallName& name, const std::string& text);
  // Whether it was over before `until`.
  bool wait(const NetJob& job, Net::Clock::time_point until);
  // Ends the call here, where it is not over: the net no longer touches its memory.
  void give_up(NetJob& job) noexcept;
  // Ends all that is under way, here and on the ranks that are connected to this one.
  void abort(const std::string& why) noexcept;
  // The same without a reason: ranks that need this one's part learn that it has left.
  void leave() noexcept;

 private:
  const std::shared_ptr<Net> net_;
  NetBox* box_ = nullptr;
};

}  // namespace lockstep::comm
