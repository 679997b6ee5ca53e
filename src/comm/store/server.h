// The key-value store itself: what its clients ask for, one thread for all. Speaks the protocol of
// torch.distributed's TCPStore (protocol.h). libtorch's own server looks up the name of every
// client while all others wait: where the name server is out of reach each costs ten seconds.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/store/protocol.h"
#include "comm/store/values.h"
#include "core/files/fd.h"
#include "core/security/tls.h"

namespace lockstep::comm {

class StoreServer {
 public:
  // Of what has been read or is to be sent, for all clients.
  static constexpr size_t kMostBuffered = size_t{256} << 20;
  // How long linger() and the destructor wait for ranks that form a group, and when the job is
  // over.
  static constexpr std::chrono::milliseconds kLinger{5000}, kLingerWhenOver{200};

  // Serves the clients that connect to `listening` until it is destroyed; the destructor waits
  // until no rank is still forming a group (Store::Making), kLinger at most. With a key, serves
  // only clients that know it, over TLS. Of clients that are not identified yet a few hundred are
  // kept, fewer where the process may have few descriptors: the oldest makes room for the next.
  // Throws CommError when the system gives no descriptor or thread.
  explicit StoreServer(Fd listening, std::optional<Digest> key = std::nullopt,
                       std::function<bool()> is_job_over = {});
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  const std::optional<Digest>& key() const { return key_; }
  // Blocks until no rank is still forming a group, kLinger at most.
  void linger() const;
  // Answered so far.
  uint64_t requests() const { return requests_; }

 private:
  struct Client {
    Fd fd;
    std::unique_ptr<Tls> tls = nullptr;
    std::string in = {}, out = {};
    size_t sent = 0;          // of `out`
    bool identified = false;  // has sent the magic
    bool gone = false;
    bool full = false;     // `out` waits for the network
    bool refused = false;  // what it last set: the values are too many
    // What it waits for: keys, of which it gets the values then, or a barrier's sum.
    bool waits = false, gets = false;
    std::vector<std::string> keys = {};
    std::string barrier = {};
    int64_t sum = 0;
  };

  using Clock = std::chrono::steady_clock;

  void serve();
  bool has_ended(Clock::time_point asked) const;
  bool watch(const Fd& fd, uint32_t events, const void* who);
  bool accept_all();
  bool drop_oldest_unidentified();
  void drop(Client& client);
  void read_from(Client& client);
  void take(Client& client, std::string_view bytes);
  void say(Client& client, const StoreMessage& message);
  void flush(Client& client);
  void answer(Client& client, const StoreRequest& request);
  bool is_over(const Client& client) const;
  bool keep(Client& client, const std::function<void()>& put);
  void wait(Client& client);
  void end_waits();

  std::atomic<uint64_t> requests_ = 0;
  std::atomic<int64_t> making_ = 0;  // what Store::Making counts
  const Fd listening_;
  const Fd stop_;  // an eventfd
  const Fd events_;
  const std::optional<Digest> key_;
  const std::function<bool()> is_job_over_;
  const size_t most_unidentified_;
  std::list<Client> clients_;
  size_t unidentified_ = 0;  // of clients_: neither identified nor gone
  size_t buffered_ = 0;
  StoreValues values_;
  bool lost_ = false;  // a client that is still in the list
  std::thread thread_;
};

}  // namespace lockstep::comm
