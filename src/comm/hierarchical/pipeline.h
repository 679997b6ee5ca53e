// Steps of collectives on two levels, each level in one order on all ranks.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>

#include "lockstep/comm/work.h"

namespace lockstep::comm {

// One chunk of a collective: first within the host, then between hosts, then within the host again.
// A step that is empty is left out.
struct Stages {
  std::function<Work()> within;
  std::function<Work()> across;
  std::function<Work()> back;
};

// Starts the steps of all chunks in the order in which the chunks were added, so that every rank
// starts them in the same order, whichever chunk it waits for first.
class Pipeline {
 public:
  class Chunk;

  std::shared_ptr<Chunk> add(Stages steps);
  // Takes all chunks further without waiting.
  void advance();
  bool is_over(Chunk& chunk);
  // Waits for the chunk, about as long as `limit`; false when it is not over then.
  bool finish_within(Chunk& chunk, std::chrono::microseconds limit);

 private:
  void go_across();
  void come_back();

  std::deque<std::shared_ptr<Chunk>> within_;
  std::deque<std::shared_ptr<Chunk>> across_;
  std::deque<std::shared_ptr<Chunk>> back_;
};

}  // namespace lockstep::comm
