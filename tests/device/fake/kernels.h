// The kernels of cuda_ipc on the host: the text that NVRTC compiles for a GPU, compiled by the
// host's compiler, with threads in place of a block's threads.
#pragma once

#include <string>

#include "comm/cuda_ipc/calls.h"

namespace lockstep::test::fake {

// As NVRTC is told: LOCKSTEP_ELEMENT and so on; empty without.
struct Variant {
  std::string element, combine, ranks;
};
using CombineKernel = void (*)(const comm::cuda_ipc::Round&);
// Null for what is not compiled: groups of 2, 3 and 4 ranks are.
CombineKernel combine_kernel(const Variant& variant);
void copy_kernel(const comm::cuda_ipc::Round& round);
void message_kernel(const comm::cuda_ipc::Messages& messages);

struct Grid {
  unsigned blocks = 1, threads = 1;
  bool at_once = false;  // all blocks; else one after another
};
// Runs `kernel(argument)` on each of the threads.
void run_grid(const Grid& grid, void (*kernel)(const void*), const void* argument);

}  // namespace lockstep::test::fake
