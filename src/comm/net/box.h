// The messages of one group over TCP: where each is delivered, what waits for what, and how a
// failure reaches all operations under way. No torch. Not thread-safe: the net's mutex is held.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "comm/net/frame.h"
#include "comm/net/job.h"
#include "comm/net/line.h"

namespace lockstep::comm {

// What a box needs of the net. Ranks are the world's.
class NetWires {
 public:
  virtual ~NetWires() = default;
  virtual NetLine& line_to(int peer) = 0;  // connects where there is no connection yet
  // The same, but does not connect.
  virtual NetLine& line_if_any(int peer) = 0;
  // Why nothing more comes from there; nothing while something may.
  virtual std::optional<std::string> gone(int peer) const = 0;
  virtual void forget(const NetJob* job) = 0;
  virtual void changed() = 0;  // a job is over
};

class NetBox {
 public:
  using Then = std::function<void()>;

  NetBox(uint64_t id, NetWires& wires) : id_(id), wires_(wires) {}

  // From now on it has calls. Frames that came before are kept for them.
  void join(int rank, std::vector<int> members);
  bool is_joined() const { return !members_.empty(); }
  // The group is over: tells the others so, or that it was aborted where calls are under way.
  void leave();
  // Ends all calls, and tells the others.
  void abort(const std::string& why);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }

  std::shared_ptr<NetJob> open(const NetCallName& name);
  // In the place of open(): this rank has made the collective, `text`, in which it moves nothing.
  // Messages of another one in its place abort the group.
  void skip(const NetCallName& name, const std::string& text);
  // Between open() and this a job is not over, whatever its messages do.
  void begun(NetJob& job) { release(job); }
  // Of the group's ranks. `then` is called when the message's memory may be used again, or is full.
  void send(NetJob& job, int peer, uint32_t part, const char* data, int64_t bytes, Then then);
  void recv(NetJob& job, int peer, uint32_t part, char* data, int64_t bytes, Then then);

  NetTarget arrived(int peer, const NetFrame& frame);
  // Nothing more comes from that rank of the world.
  void lost(int peer, const std::vector<NetJob*>& unsent);
  void fail(NetJob& job, NetFailure failure);

 private:
  using CallKey = std::tuple<NetCallName::Kind, int, uint32_t>;  // the world's peer
  struct Message {
    char* data = nullptr;
    int64_t bytes = 0;
    // A reference, since `then` may end the call and its waiter then releases it at once.
    std::shared_ptr<NetJob> job = nullptr;
    Then then = {};
  };
  struct Early {
    std::unique_ptr<char[]> data;
    int64_t bytes = 0;
    uint32_t checksum = 0;
    bool complete = false;
  };
  struct Announced {
    int64_t bytes = 0;
    uint32_t checksum = 0;
  };
  struct Peer {
    std::map<NetKey, Message> posted;
    std::map<NetKey, std::shared_ptr<Early>> early;
    std::map<NetKey, Message> ungranted;
    std::map<NetKey, Announced> grants, offers;
    // Eager messages: those that wait for credit, what is under way, what was taken and not
    // credited yet.
    std::deque<std::pair<NetKey, Message>> waiting;
    int64_t out_bytes = 0, taken_bytes = 0;
    uint32_t out_count = 0, taken_count = 0;
    bool left = false;
  };

  static NetKey key_of(const NetJob& job, uint32_t part);
  CallKey call_key(const NetJob& job) const;
  NetJob* call_of(int peer, const NetFrame& frame) const;
  NetFrame frame_of(NetKind kind, const NetJob& job, const NetKey& key, int64_t bytes) const;
  bool agrees(const NetFrame& frame, NetJob* job);
  void refuse_others_of(const std::string& text);
  void check_heard(NetJob& job, int peer);
  void transmit(int peer, NetKind kind, const NetKey& key, Message message);
  void pump(int peer);
  void taken(int peer, int64_t bytes);
  NetTarget message(int peer, const NetFrame& frame);
  void early_is_here(int peer, const NetKey& key, const std::shared_ptr<Early>& early);
  void complete(Message message);
  void release(NetJob& job);
  void end(NetJob& job);
  void end_all(const NetFailure& failure);
  std::optional<std::string> silent(int peer) const;
  int member(int peer) const;
  void peer_aborted(int peer, const std::string& why);

  const uint64_t id_;
  NetWires& wires_;
  int rank_ = 0;
  std::vector<int> members_;
  std::map<int, Peer> peers_;
  std::map<CallKey, std::shared_ptr<NetJob>> open_;
  std::optional<NetFailure> dead_;
  bool closed_ = false;
  // Collectives in which nothing moves: the last ones of this rank.
  struct Skipped {
    uint32_t number = 0;
    uint32_t checksum = 0;
    std::string text;
  };
  std::deque<Skipped> skipped_;
};

}  // namespace lockstep::comm
