// What a stream of the fake device shows of itself to the fake NCCL and the fake driver, in place
// of a cudaStream_t.
#pragma once

struct FakeStreamHandle {
  // Runs `run(argument)` after everything enqueued before, once or, if the stream records a graph,
  // whenever that is launched; then `release(argument)`.
  void (*enqueue_communication)(FakeStreamHandle* stream, void (*run)(void*), void* argument,
                                void (*release)(void*));
  // Waits until everything that was enqueued has run.
  void (*finish)(FakeStreamHandle* stream);
};
