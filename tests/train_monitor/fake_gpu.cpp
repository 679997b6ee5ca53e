// The functions of NVIDIA's driver and of NVML that are asked how busy a GPU is, of a host with two
// GPUs of which a process may see the second, that computes for 37 % of the time.
#include <cstring>

namespace {

constexpr const char* kBus = "0000:C1:00.0";
int g_gpu = 0;
bool g_is_ready = false;

}  // namespace

extern "C" {

int cuDeviceGet(int* device, int ordinal) {
  *device = 7;
  return ordinal == 0 ? 0 : 101;
}

int cuDeviceGetPCIBusId(char* text, int length, int device) {
  if (device != 7 || length < 13) return 1;
  std::strcpy(text, kBus);
  return 0;
}

int nvmlInit_v2() {
  g_is_ready = true;
  return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  *device = &g_gpu;
  return g_is_ready && std::strcmp(bus, kBus) == 0 ? 0 : 6;
}

int nvmlDeviceGetUtilizationRates(void* device, unsigned* percent) {
  if (device != &g_gpu) return 2;
  percent[0] = 37;
  percent[1] = 90;
  return 0;
}
}
