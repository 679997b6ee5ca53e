// CUDA, of which a process without GPUs touches nothing. cuda_unavailable.cpp takes this file's
// place in a build without.
#pragma once

#include <string>

namespace lockstep::comm {

struct CudaDevices {
  int count = 0;             // that this process may see
  std::string problem = {};  // why there are none
};

// Asks the driver, and where there are devices loads libtorch's part for them, which must come
// before the first question to libtorch whether it has CUDA: it remembers the answer.
CudaDevices find_cuda();

}  // namespace lockstep::comm
