// The key-value store itself: what its clients ask for, one thread for all. Speaks the protocol of
// torch.distributed's TCPStore (store_protocol.h). libtorch's own server looks up the name of every
// client while all others wait: where the name server is out of reach each costs ten seconds.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "comm/store_protocol.h"
#include "core/fd.h"

namespace lockstep::comm {

class StoreServer {
 public:
  // Serves whoever connects to `listening`, until it is destroyed. Throws CommError when the system
  // gives no descriptor or thread.
  explicit StoreServer(Fd listening);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  struct Client {
    Fd fd;
    std::string in, out;
    bool known = false;  // has sent the magic
    bool gone = false;
    bool full = false;  // `out` waits for the network
    // What it waits for: keys, or a barrier's sum.
    bool waits = false;
    std::vector<std::string> keys = {};
    std::string barrier = {};
    int64_t sum = 0;
  };

  void serve();
  bool watch(const Fd& fd, uint32_t events, const void* who);
  bool accept_all();
  void drop(Client& client);
  void read_from(Client& client);
  void say(Client& client, const StoreMessage& message);
  void flush(Client& client);
  void answer(Client& client, const StoreRequest& request);
  std::string& value(const std::string& key);
  int64_t number(const std::string& key) const;
  int64_t add(const std::string& key, int64_t amount);
  bool has(const std::string& key) const;
  bool is_over(const Client& client) const;
  void wait(Client& client);
  void end_waits();

  const Fd listening_;
  const Fd stop_;  // an eventfd
  const Fd events_;
  std::list<Client> clients_;
  std::map<std::string, std::string> values_;
  std::map<std::string, std::deque<std::string>> queues_;
  bool changed_ = false;  // since waits were last looked at
  bool lost_ = false;     // a client that is still in the list
  std::thread thread_;
};

}  // namespace lockstep::comm
