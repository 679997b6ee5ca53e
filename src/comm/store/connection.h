// A connection to a key-value store, and how long it is waited for.
#pragma once

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/files/fd.h"
#include "core/security/tls.h"

namespace lockstep::comm {

// Why a call failed, in words that end a sentence.
class StoreFailure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The server has answered that no rank has set what is waited for.
class StoreUnset : public StoreFailure {
  using StoreFailure::StoreFailure;
};

// The connection was refused: no process listens on that port.
class StoreAbsent : public StoreFailure {
  using StoreFailure::StoreFailure;
};

// This host cannot connect there, however long it waits.
class StoreUnreachable : public StoreFailure {
  using StoreFailure::StoreFailure;
};

// The server has refused a request; the text ends an error message. The connection keeps working.
class StoreRefusal : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Why a call stopped waiting before its deadline, as when the launcher reports a failure.
class StoreGivenUp : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// How long a call waits.
class StorePatience {
 public:
  using Clock = std::chrono::steady_clock;
  using Deadline = Clock::time_point;
  // Asked every 50 ms: the reason to stop waiting, if there is one. From then on 0.1 s are left.
  using Heed = std::function<std::optional<std::string>()>;

  StorePatience(Deadline deadline, const Heed& heed) : heed_(heed), deadline_(deadline) {}

  std::chrono::milliseconds left() const;
  bool is_over() const { return left() == std::chrono::milliseconds(0); }
  // For one wait, before the next look().
  std::chrono::milliseconds slice() const;
  // The deadline is `time` from now, or sooner where an abort was noticed.
  void extend(Clock::duration time);
  StorePatience at_most(Clock::duration time) const;
  void look();
  // It is over.
  template <class Failure = StoreFailure>
  [[noreturn]] void fail(const std::string& otherwise) const {
    if (why_) throw StoreGivenUp(*why_);
    throw Failure(otherwise);
  }

 private:
  const Heed& heed_;
  Deadline deadline_;
  std::optional<std::string> why_;
};

// A connection, and over it TLS where there is a key. All calls throw StoreFailure, and
// StoreGivenUp where `Heed` says to stop.
class StoreLine {
 public:
  static constexpr const char* kUnanswered =
      "no answer: the process that serves it has ended or is stopped, or its host is cut off";

  // Tries until a store answers there; with a key, one that has it. A name is looked up again each
  // time. With `was_there` a server is known to have run there, so a refused connection means that
  // it has ended, and is an error at once.
  static std::unique_ptr<StoreLine> meet(const std::string& host, int port,
                                         const std::optional<Digest>& key, StorePatience& patience,
                                         bool was_there);

  StoreLine(Fd fd, const std::optional<Digest>& key);

  void send(std::string_view bytes, StorePatience& patience);
  std::string receive(size_t count, StorePatience& patience);
  template <class T>
  T number(StorePatience& patience) {
    T value;
    std::memcpy(&value, receive(sizeof value, patience).data(), sizeof value);
    return value;
  }
  std::string text(StorePatience& patience);
  // False when it is over before anything has come.
  bool is_answered(StorePatience& patience);

 private:
  void send_raw(std::string_view bytes, StorePatience& patience);
  void more(StorePatience& patience);

  const Fd fd_;
  std::unique_ptr<Tls> tls_;
  std::string in_;
  size_t used_ = 0;
};

}  // namespace lockstep::comm
