// Steps of collectives on two levels, each level in one order on all ranks.
#pragma once

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
  // Starts what can be started without waiting.
  void advance();
  bool is_over(Piece& piece);
  // Blocks until the piece is over.
  void finish(Piece& piece);

 private:
  void go_across();
  void come_back();

  std::deque<std::shared_ptr<Piece>> within_;
  std::deque<std::shared_ptr<Piece>> across_;
};

}  // namespace lockstep::comm
