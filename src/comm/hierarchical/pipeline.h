// Steps of collectives on two levels, each level in one order on all ranks.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>

#include "lockstep/comm/work.h"

namespace lockstep::comm {

// One piece of a collective: first within the host, then between hosts, then within the host again.
// A step that is empty is left out.
struct Staircase {
  std::function<Work()> within;
  std::function<Work()> across;
  std::function<Work()> back;
};

// Starts the steps of all pieces in the order in which the pieces were added, so that every rank
// starts them alike, whichever piece it waits for first.
class Pipeline {
 public:
  class Piece;

  std::shared_ptr<Piece> add(Staircase steps);
  // Takes all pieces further without waiting.
  void advance();
  bool is_over(Piece& piece);
  // Waits for the piece, about as long as `limit`; false when it is not over then.
  bool finish_within(Piece& piece, std::chrono::microseconds limit);

 private:
  void go_across();
  void come_back();

  std::deque<std::shared_ptr<Piece>> within_;
  std::deque<std::shared_ptr<Piece>> across_;
  std::deque<std::shared_ptr<Piece>> back_;
};

}  // namespace lockstep::comm
