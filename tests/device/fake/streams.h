// Streams of the fake device, and events between them.
#pragma once

#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

#include "device/fake/stream.h"

namespace lockstep::test::fake {

class FakeStream : public FakeStreamHandle {
 public:
  FakeStream();

  // Its number in the stream.
  uint64_t push(std::function<void()> work, bool is_communication = false);
  // Whether everything up to `number` has run.
  bool is_done(uint64_t number);
  // Lets it run, and waits until it has.
  void finish(uint64_t number);
  void finish_all() { finish(pushed()); }
  uint64_t pushed();

  static FakeStream& of(const c10::Stream& stream);
  static FakeStream& current();

 private:
  friend void shut_gate();
  friend void open_gate();
  friend int held_back();
  struct Task {
    std::function<void()> work;
    bool is_communication;
  };
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t pushed_ = 0, done_ = 0, wanted_ = 0;
};

struct FakeEvent {
  FakeStream* stream = nullptr;
  uint64_t number = 0;
};

}  // namespace lockstep::test::fake
