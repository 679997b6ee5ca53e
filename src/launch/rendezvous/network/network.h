// Connections with other launchers: a listening socket, and a channel on each connection.
// Nothing here waits.
#pragma once

#include <poll.h>

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/network/address.h"
#include "launch/rendezvous/network/secure_channel.h"
#include "launch/rendezvous/node/node.h"

namespace lockstep::launch {

class Network {
 public:
  using Clock = std::chrono::steady_clock;

  // Receives events. May call the network back.
  class Handler {
   public:
    virtual ~Handler() = default;
    // A launcher that knows the token has connected: returns the number of that link.
    virtual ConnectionId on_accept() = 0;
    virtual void on_connect(ConnectionId link) = 0;
    virtual void on_message(ConnectionId link, const MessagePtr& message) = 0;
    // Nothing more comes from it. `refused`: there is no listener at the address, where an earlier
    // connection got through, if any did.
    virtual void on_close(ConnectionId link, bool refused) = 0;
    // A line for the log: which connection was refused, and why.
    virtual void on_refused_connection(const std::string& text) = 0;
    // The peer that this launcher has connected to is not of the job, or rejects this launcher.
    // on_close() follows.
    virtual void on_disagreement(const std::string& text) = 0;
  };

  // `socket` listens and does not block; without one there are no incoming connections. `patience`:
  // for a connection to be opened and the handshake to be over.
  Network(Fd socket, const Keys& keys, Clock::duration patience, Handler& handler);

  // To one of the addresses `found` of a host that is known as `name`: of several another one each
  // time, until a connection gets through. Without any, to where the last one got through.
  void dial(ConnectionId link, const std::string& name, const std::vector<Address>& found);
  void send(ConnectionId link, const MessagePtr& message);
  // "10.0.0.1: Connection refused, fd00::1: no answer": what came of the addresses that were
  // dialled since a connection got through.
  std::string misses() const;
  // Closes it when what was sent is on its way.
  void hang_up(ConnectionId link);

  void await(std::vector<pollfd>& events) const;
  std::optional<Clock::time_point> deadline() const;
  // After each poll().
  void pump();
  // The launcher ends: listens no more, and sends what was sent, for at most so long.
  void finish(Clock::duration limit);

 private:
  struct Connection {
    const uint64_t number;
    Fd socket = {};
    uint32_t events = 0;                    // that epoll is to report
    std::optional<ConnectionId> link = {};  // none: has not proved yet that it belongs to the job
    std::string peer;                       // its address
    Address to = {};                        // that was dialled
    SecureChannel channel;
    bool connecting = false;
    bool closing = false;          // once the output is gone
    Clock::time_point until = {};  // the handshake's end, or the closing's
    std::string output = {};
    bool over = false;
  };

  Connection& add(SecureChannel::Side side, std::string peer);
  const Address* choose(const std::vector<Address>& found);
  void connect_to(ConnectionId link, const std::string& name, const Address* address);
  void watch(Connection& connection);
  void accept_all();
  void listen_again_when_due();
  void pump(Connection& connection);
  void drop_the_late();
  void read(Connection& connection);
  void flush(Connection& connection);
  void close(Connection& connection, bool refused = false);
  void deliver(Connection& connection);
  void say(const Connection& connection, const std::string& what);
  void say_what_is_due();
  Clock::time_point says_at() const;
  Connection* find(ConnectionId link);

  Fd socket_;
  const Keys keys_;
  const Clock::duration patience_;
  Handler& handler_;
  // A coordinator has a connection with each host, and handles only those with events.
  const Fd epoll_;
  std::set<std::string> tried_;                     // addresses, since a connection got through
  std::map<std::string, std::string> misses_;       // by address: why none got through
  std::optional<Address> reached_;                  // by the last one that did
  std::optional<Clock::time_point> listens_again_;  // no descriptor is left for a new connection
  uint64_t last_number_ = 0;
  std::map<uint64_t, Connection> connections_;
  std::unordered_map<ConnectionId, Connection*> links_;
  std::set<uint64_t> unproved_;  // have connected and not proved anything yet
  Clock::time_point last_said_{};
  MessagePtr encoded_;  // into bytes_: a message to all is encoded once
  std::string bytes_;
  int unsaid_ = 0;
  std::string last_text_, last_cause_, said_cause_;  // a cause: the host, and what it did
};

}  // namespace lockstep::launch
