// Streams of the fake device, and events between them.
#pragma once

#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device/fake/stream.h"

namespace lockstep::test::fake {

class FakeStream;

// What streams were told while they captured, in the order in which they were.
struct Recording {
  std::mutex mutex;
  std::vector<std::function<void()>> work;
  std::vector<std::shared_ptr<void>> memory;  // freed during the capture; the graph keeps it
  // Of each stream: how much of it, and how much of that another stream waits for.
  std::map<FakeStream*, uint64_t> recorded, joined;
};

class FakeStream : public FakeStreamHandle {
 public:
  FakeStream();

  // From here on what is pushed is recorded in place of being run; null: no longer.
  void record_into(std::shared_ptr<Recording> recording);
  std::shared_ptr<Recording> recording();

  // Its number in the stream.
  uint64_t push(std::function<void()> work, bool is_communication = false);
  // Whether everything up to `number` has run.
  bool is_done(uint64_t number);
  // Lets it run, and waits until it has.
  void finish(uint64_t number);
  void finish_all();
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
  std::shared_ptr<Recording> recording_;
};

// Memory that a stream still uses, as the allocator is told; and what was told of it, once.
using StreamUses = std::vector<std::pair<FakeStream*, uint64_t>>;
void note_use(const void* memory, FakeStream& stream);
StreamUses take_uses(const void* memory);

struct FakeEvent {
  FakeStream* stream = nullptr;
  uint64_t number = 0;
  std::shared_ptr<Recording> recording;  // in which the number is, if it is in one
};

}  // namespace lockstep::test::fake
