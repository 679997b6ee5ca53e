#include "comm/hierarchical/pipeline.h"

#include <utility>

namespace lockstep::comm {

class Pipeline::Chunk {
 public:
  explicit Chunk(Stages steps) : steps_(std::move(steps)) {}

  // Starts the next step, if the chunk has it.
  void start_next() {
    const auto& step = stage_ == Within   ? steps_.within
                       : stage_ == Across ? steps_.across
                                          : steps_.back;
    work_ = step ? step() : Work();
  }

  enum Stage { Within, Across, Back };
  Stage stage_ = Within;
  Work work_;
  Stages steps_;
};

std::shared_ptr<Pipeline::Chunk> Pipeline::add(Stages steps) {
  auto chunk = std::make_shared<Chunk>(std::move(steps));
  chunk->start_next();
  within_.push_back(chunk);
  advance();
  return chunk;
}

void Pipeline::go_across() {
  const std::shared_ptr<Chunk> chunk = within_.front();
  chunk->work_.wait();
  chunk->stage_ = Chunk::Across;
  within_.pop_front();
  across_.push_back(chunk);
  chunk->start_next();
}

void Pipeline::come_back() {
  const std::shared_ptr<Chunk> chunk = across_.front();
  chunk->work_.wait();
  chunk->stage_ = Chunk::Back;
  across_.pop_front();
  back_.push_back(chunk);
  chunk->start_next();
}

void Pipeline::advance() {
  while (!within_.empty() && within_.front()->work_.is_completed()) go_across();
  while (!across_.empty() && across_.front()->work_.is_completed()) come_back();
  while (!back_.empty() && back_.front()->work_.is_completed()) back_.pop_front();
}

bool Pipeline::is_over(Chunk& chunk) {
  advance();
  return chunk.stage_ == Chunk::Back && chunk.work_.is_completed();
}

bool Pipeline::finish_within(Chunk& chunk, std::chrono::microseconds limit) {
  advance();
  Chunk& next = chunk.stage_ == Chunk::Within   ? *within_.front()
                : chunk.stage_ == Chunk::Across ? *across_.front()
                                                : chunk;
  const bool was_last = chunk.stage_ == Chunk::Back;
  return next.work_.wait_for(limit) && was_last;
}

}  // namespace lockstep::comm
