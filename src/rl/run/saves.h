// Checkpoints for which the disk may have no room.
#pragma once

#include <functional>
#include <map>
#include <string>

namespace lockstep::rl {

// Lets a run go on without a checkpoint that a full disk does not take. The same on all ranks, on
// all of which a save fails alike.
class Saves {
 public:
  // `strict`: a full disk is an error as any other. `warns`: of the others, this rank warns.
  Saves(bool strict, bool warns) : strict_(strict), warns_(warns) {}

  // Calls `save`, which writes into `folder`. Throws what it throws, unless the disk is full.
  void attempt(const std::string& folder, const std::function<void()>& save);
  // What the disk did not take, where no later save into the same folder has succeeded; empty where
  // all is well.
  std::string problem() const;

 private:
  bool strict_, warns_;
  std::map<std::string, std::string> missing_;  // by folder: why
};

}  // namespace lockstep::rl
