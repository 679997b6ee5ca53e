// Messages between two ranks that share memory: for each ordered pair two slots, which the sender
// fills and the receiver empties in turn. Large pieces lie in memory of the sender that all its
// messages share, since most pairs of many ranks never talk. Messages of one pair arrive in the
// order in which they were sent; those of different pairs do not wait for each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "comm/shm/channel.h"

namespace lockstep::comm {

// One message on its way, as its sender or its receiver sees it.
struct Message {
  bool sending = false;
  int peer = 0;
  int peer_name = 0;  // what messages call it
  int tag = 0;
  std::string dtype;
  int64_t count = 0;  // elements
  int64_t bytes = 0;
  char* data = nullptr;
  std::shared_ptr<void> keep;  // what owns `data`
  std::chrono::milliseconds timeout{0};
  std::string label;

  Channel::Clock::time_point waiting_since{};
  Channel::Clock::time_point next_look{};  // at the peers, by a rank that polls
  int64_t moved = 0;
  bool started = false;
  bool over = false;

  // "recv from rank 2 (message 0, float32 x 10)"
  std::string text() const;
};

class Mailbox {
 public:
  // Bytes of shared memory for `size` ranks.
  static int64_t bytes_for(int size);

  Mailbox(char* memory, Channel& channel);

  // Queues a message and moves what can be moved at once.
  void start(std::shared_ptr<Message> message);
  // Moves what can be moved; true when something was.
  bool step();
  // Messages that are not over.
  int waiting() const { return waiting_; }

 private:
  struct Box;
  struct Header;
  // Of a large slot: until `peer` has taken the piece that was put in as number `put`.
  struct Use {
    int peer = -1;
    uint32_t put = 0;
  };
  static int64_t boxes_bytes(int size);
  Box& box(int from, int to) const;
  char* large_slot(int from, int32_t slot) const;
  int32_t free_large_slot() const;
  bool step(Message& message);
  bool put(Message& message);
  bool take(Message& message);

  char* memory_;
  Channel& channel_;
  std::vector<std::deque<std::shared_ptr<Message>>> lanes_;  // 2 * peer + sending
  std::vector<Use> uses_;                                    // of this rank's large slots
  int waiting_ = 0;
};

}  // namespace lockstep::comm
