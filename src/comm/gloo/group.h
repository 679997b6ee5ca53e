// c10d's process group with access to two of its private members. The only file that includes
// c10d's header, which needs the declarations in stub/.
#pragma once

#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace lockstep::comm {

// Gloo matches messages to calls by nothing but a number that c10d counts up: when ranks call
// different things, a process is aborted from Gloo's own thread (a message longer than its buffer)
// or gets wrong data (a shorter one). So the number is made to hold a checksum of the call:
// different calls then wait for each other until a deadline.
class GlooGroup final : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;

  // The number of the next collective.
  void set_tag(uint32_t tag) { collectiveCounter_ = tag; }
  // As torch.distributed's ranks do for a collective that sends nothing.
  void skip_tag() { ++collectiveCounter_; }

  // Held while a call is started: c10d counts calls without a lock, and our threads start messages,
  // too.
  std::mutex& mutex() { return mutex_; }

 private:
  std::mutex mutex_;
};

}  // namespace lockstep::comm
