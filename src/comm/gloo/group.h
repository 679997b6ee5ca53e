// c10d's process group with the two things that Lockstep needs of its inside. Alone in including
// c10d's header, which needs the stand-ins of gloo_stub/.
#pragma once

#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace lockstep::comm {

// Gloo finds out which message belongs to which call by a number that c10d counts up, and nothing
// else: when ranks call different things, a process is aborted from Gloo's own thread (a message
// longer than its buffer) or gets wrong data (a shorter one). So the number is made to hold a
// checksum of the call: different calls then wait for each other until a deadline.
class GlooGroup final : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;

  // The number of the next collective.
  void set_tag(uint32_t tag) { collectiveCounter_ = tag; }
  // As torch.distributed's ranks do for a collective that sends nothing.
  void skip_tag() { ++collectiveCounter_; }

  // Held while a call is started: c10d counts calls without a lock, and messages come from threads
  // of ours.
  std::mutex& mutex() { return mutex_; }

 private:
  std::mutex mutex_;
};

}  // namespace lockstep::comm
