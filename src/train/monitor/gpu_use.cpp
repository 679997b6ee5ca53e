#include "train/monitor/gpu_use.h"

#include <dlfcn.h>

namespace lockstep::train {
namespace {

// As NVML's nvmlUtilization_t, in percent.
struct Utilization {
  unsigned gpu = 0, memory = 0;
};

// Null where the library has no such function, or is not there.
template <class Function>
Function* function_of(void* library, const char* name) {
  return library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
}

// NVML counts all GPUs of the host, CUDA those that the process may see: both know the bus.
std::string bus_of(int device, const std::string& driver) {
  void* const cuda = dlopen(driver.c_str(), RTLD_NOW | RTLD_LOCAL);
  const auto find = function_of<int(int*, int)>(cuda, "cuDeviceGet");
  const auto name = function_of<int(char*, int, int)>(cuda, "cuDeviceGetPCIBusId");
  int handle = 0;
  char text[32] = {};
  if (find == nullptr || name == nullptr || find(&handle, device) != 0) return "";
  return name(text, sizeof text, handle) == 0 ? text : "";
}

}  // namespace

std::function<double()> gpu_use(int device, const GpuLibraries& libraries) {
  const std::function<double()> unknown = [] { return -1.0; };
  const std::string bus = bus_of(device, libraries.driver);
  if (bus.empty()) return unknown;
  void* const nvml = dlopen(libraries.nvml.c_str(), RTLD_NOW | RTLD_LOCAL);
  const auto init = function_of<int()>(nvml, "nvmlInit_v2");
  const auto find = function_of<int(const char*, void**)>(nvml, "nvmlDeviceGetHandleByPciBusId_v2");
  const auto rates = function_of<int(void*, Utilization*)>(nvml, "nvmlDeviceGetUtilizationRates");
  if (init == nullptr || find == nullptr || rates == nullptr) return unknown;
  void* gpu = nullptr;
  if (init() != 0 || find(bus.c_str(), &gpu) != 0) return unknown;
  return [rates, gpu] {
    Utilization now;
    return rates(gpu, &now) == 0 ? now.gpu / 100.0 : -1.0;
  };
}

}  // namespace lockstep::train
