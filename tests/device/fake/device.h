// A device for tests: its memory is the host's, but what is enqueued on its streams runs later, in
// threads of their own, as on a GPU; so a missing wait shows as a wrong result. libtorch knows it
// as "privateuseone", from the start of every program that links this.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace lockstep::test::fake {

// From shut_gate() on communication stays in its stream until something waits for it: another
// stream by an event, or the host. So none is over early by chance.
void shut_gate();
void open_gate();
// Communication that is enqueued and has not begun.
int held_back();

// From here on every question is answered with an error, as after a kernel of CUDA's that failed.
void fail_device();

// Bytes of this process's tensors, once its streams have come to their ends.
int64_t memory_in_use();

struct Recording;

// What `body` puts into the current stream, and into those that wait for it, as a CUDA graph.
class Graph {
 public:
  explicit Graph(const std::function<void()>& body);
  // On the current stream; as often as one likes.
  void launch() const;

 private:
  std::shared_ptr<Recording> recording_;
};
bool is_capturing(const c10::Stream& stream);

// Runs `work` on a stream after what is there.
void enqueue(const c10::Stream& stream, std::function<void()> work);
c10::Stream current_stream();

inline at::Device device() { return at::Device(at::kPrivateUse1, 0); }

}  // namespace lockstep::test::fake
