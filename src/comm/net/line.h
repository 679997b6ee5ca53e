// One connection between two ranks, after the handshake: frames out of a queue, payloads straight
// from and to where the messages lie. No torch. Not thread-safe: the net's mutex is held.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/net/frame.h"
#include "core/files/fd.h"
#include "core/security/tls.h"

namespace lockstep::comm {

class NetJob;

// Where a payload goes, and what is called when all of it is there. Without an address it is read
// and forgotten.
struct NetTarget {
  char* to = nullptr;
  NetJob* job = nullptr;  // the job that owns the memory, or null
  std::function<void()> done = {};
};

// Receives what arrives on a connection.
class NetSink {
 public:
  virtual ~NetSink() = default;
  // A frame from that rank; for one with a payload, where that goes. Throws Error to end the
  // connection.
  virtual NetTarget arrived(int peer, const NetFrame& frame) = 0;
};

class NetLine {
 public:
  NetLine(int peer, NetSink& sink) : peer_(peer), sink_(sink) {}

  // What was to be sent before waits for this. With a channel everything is encrypted.
  void open(Fd fd, std::optional<Tls> tls = std::nullopt);
  bool is_open() const { return static_cast<bool>(fd_); }
  // Ends it; returns the jobs whose messages were still to be sent.
  std::vector<NetJob*> close();
  int fd() const { return fd_.get(); }

  // After what is already to be sent. `done` once all of it has been handed to the kernel.
  void send(const NetFrame& frame, const char* payload = nullptr, NetJob* job = nullptr,
            std::function<void()> done = {});
  // The same before every message that has not begun.
  void send_urgent(const NetFrame& frame, std::string payload = {});

  // Both go as far as they can without waiting; what they throw (Error) is why the connection is at
  // its end.
  void flush();
  void read();
  bool has_output() const { return !urgent_.empty() || !queue_.empty() || has_encrypted(); }

  // Nothing of the job's memory is touched any more.
  void forget(const NetJob* job);
  // Reads and discards what the peer still sends, so that the kernel can close the connection in
  // order; false when all that was sent has arrived, or never will.
  bool lingers();

 private:
  struct Out {
    std::string head;  // and for an urgent frame all of it
    const char* payload = nullptr;
    int64_t bytes = 0;
    NetJob* job = nullptr;
    std::function<void()> done = {};
    std::vector<char> kept = {};  // of a job that is over
  };

  bool flush_some();
  bool has_encrypted() const { return encrypted_at_ < encrypted_.size(); }
  ssize_t hand_over(const iovec* parts, size_t count);
  ssize_t encrypt(const iovec* parts, size_t count);
  bool send_encrypted();
  ssize_t receive();
  void decrypt(std::string_view bytes);
  void sent(std::deque<Out>& from, size_t& count);
  void consume(std::string_view bytes);
  void end_payload();

  Fd fd_;
  std::optional<Tls> tls_;
  // Records for the kernel, and how much of them it has.
  std::string encrypted_;
  size_t encrypted_at_ = 0;
  const int peer_;
  NetSink& sink_;
  std::deque<Out> urgent_, queue_;
  bool in_queue_ = false;  // the message that has begun is the first of queue_
  size_t begun_ = 0;       // bytes of it that are sent
  std::vector<std::function<void()>> finished_;
  // Of the frame that is being read.
  std::string head_;
  NetTarget target_;
  int64_t left_ = 0;
  std::unique_ptr<char[]> buffer_;
};

}  // namespace lockstep::comm
