// How much of the time this rank's GPU computes.
#pragma once

#include <functional>
#include <string>

namespace lockstep::train {

// The libraries that know it, as for dlopen(): the driver and NVML.
struct GpuLibraries {
  std::string driver = "libcuda.so.1";
  std::string nvml = "libnvidia-ml.so.1";
};

// A share from 0 to 1: of the last moments (at most 1 s) those in which a kernel ran on the GPU,
// of this process or of another. -1: not known, as on a part of a GPU (MIG). `device`: as CUDA
// counts in this process. Costs some microseconds.
std::function<double()> gpu_use(int device, const GpuLibraries& libraries = {});

}  // namespace lockstep::train
