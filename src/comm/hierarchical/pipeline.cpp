#include "comm/hierarchical/pipeline.h"

#include <utility>

namespace lockstep::comm {

class Pipeline::Piece {
 public:
  explicit Piece(Staircase steps) : steps_(std::move(steps)) {}

  // Starts the next step, if the piece has it.
  void start_next() {
    const auto& step = stage_ == Within   ? steps_.within
                       : stage_ == Across ? steps_.across
                                          : steps_.back;
    work_ = step ? step() : Work();
  }

  enum Stage { Within, Across, Back };
  Stage stage_ = Within;
  Work work_;
  Staircase steps_;
};

std::shared_ptr<Pipeline::Piece> Pipeline::add(Staircase steps) {
  auto piece = std::make_shared<Piece>(std::move(steps));
  piece->start_next();
  within_.push_back(piece);
  advance();
  return piece;
}

void Pipeline::go_across() {
  const std::shared_ptr<Piece> piece = within_.front();
  piece->work_.wait();
  piece->stage_ = Piece::Across;
  within_.pop_front();
  across_.push_back(piece);
  piece->start_next();
}

void Pipeline::come_back() {
  const std::shared_ptr<Piece> piece = across_.front();
  piece->work_.wait();
  piece->stage_ = Piece::Back;
  across_.pop_front();
  back_.push_back(piece);
  piece->start_next();
}

void Pipeline::advance() {
  while (!within_.empty() && within_.front()->work_.is_completed()) go_across();
  while (!across_.empty() && across_.front()->work_.is_completed()) come_back();
  while (!back_.empty() && back_.front()->work_.is_completed()) back_.pop_front();
}

bool Pipeline::is_over(Piece& piece) {
  advance();
  return piece.stage_ == Piece::Back && piece.work_.is_completed();
}

bool Pipeline::finish_within(Piece& piece, std::chrono::microseconds limit) {
  advance();
  Piece& next = piece.stage_ == Piece::Within   ? *within_.front()
                : piece.stage_ == Piece::Across ? *across_.front()
                                                : piece;
  const bool was_last = piece.stage_ == Piece::Back;
  return next.work_.wait_within(limit) && was_last;
}

}  // namespace lockstep::comm
