// The last report of a run over HTTP, for Prometheus to fetch. Needs no torch.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "core/files/fd.h"
#include "core/network/address.h"

namespace lockstep::train {

// Answers GET and HEAD of /metrics with one thread of its own. Publishing never waits for readers.
// Any program may connect: no more than kClients are held at a time (the one that came first makes
// room for the next), each sends at most kRequest bytes and is left after kPatience, however slowly
// it reads or writes.
class MetricsServer {
 public:
  static constexpr size_t kClients = 64;
  static constexpr size_t kRequest = 8192;
  static constexpr std::chrono::milliseconds kPatience{5000};
  static constexpr uint16_t kPort = 9464;  // where the address names none

  // `address` as HOST:PORT; port 0 is a free one. Throws ConfigError for what is not an address of
  // this host, Error where it cannot listen.
  explicit MetricsServer(const std::string& address);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  // `text` as open_metrics() makes it is what is answered from now on.
  void publish(std::string text);
  // "http://127.0.0.1:9464/metrics"
  std::string url() const;

 private:
  using Clock = std::chrono::steady_clock;

  struct Client {
    Fd fd;
    Clock::time_point until;
    std::string in = {};
    std::string head = {};  // of the answer; empty before it
    std::shared_ptr<const std::string> body = {};
    size_t sent = 0;
    bool is_closing = false;  // all is sent; what still comes is not looked at
    bool is_gone = false;
  };

  void serve();
  void accept_all();
  void read_from(Client& client);
  void answer(Client& client);
  void reply(Client& client, std::string_view status, std::string_view type,
             std::shared_ptr<const std::string> body) const;
  void send_to(Client& client) const;

  Endpoint endpoint_;
  Fd listening_;
  Fd stop_;  // an eventfd
  std::mutex mutex_;
  std::shared_ptr<const std::string> text_;
  std::list<Client> clients_ = {};
  Clock::time_point accepts_from_ = {};  // later than now, where there was no descriptor to be had
  std::thread thread_;
};

}  // namespace lockstep::train
