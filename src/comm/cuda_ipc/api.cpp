#include "comm/cuda_ipc/api.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <vector>

#include "comm/host/libraries.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::cuda_ipc {
namespace {

constexpr const char* kOtherwise = "use LOCKSTEP_BACKEND=nccl, or set LOCKSTEP_DEVICE=cpu";

struct Library {
  void* handle = nullptr;
  std::string path;
};

Library open_first(const std::vector<std::string>& paths, std::string_view what,
                   std::string_view advice) {
  std::vector<std::string> problems;
  for (const std::string& path : paths) {
    if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return {handle, path};
    problems.emplace_back(dlerror());
  }
  throw ConfigError(fmt::format("[cuda_ipc] {} cannot be opened ({}): {}, {}", what,
                                fmt::join(problems, "; "), advice, kOtherwise));
}

template <class Function>
void find(const Library& library, Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library.handle, name));
}

template <class Function>
void require(const Library& library, Function& function, const char* name) {
  find(library, function, name);
  if (function != nullptr) return;
  throw ConfigError(
      fmt::format("[cuda_ipc] {} has no {}, which came with CUDA 10.2: install a "
                  "newer driver and libtorch, {}",
                  library.path, name, kOtherwise));
}

Driver open_driver() {
  const Library library = open_first({env_text("LOCKSTEP_CUDA_DRIVER").value_or("libcuda.so.1")},
                                     "NVIDIA's driver", "install it");
  Driver api{};
  api.path = library.path;
  require(library, api.Init, "cuInit");
  require(library, api.GetErrorString, "cuGetErrorString");
  require(library, api.DeviceGet, "cuDeviceGet");
  require(library, api.DeviceGetAttribute, "cuDeviceGetAttribute");
  require(library, api.DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  require(library, api.DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2");
  require(library, api.CtxPushCurrent, "cuCtxPushCurrent_v2");
  require(library, api.CtxPopCurrent, "cuCtxPopCurrent_v2");
  require(library, api.MemGetAllocationGranularity, "cuMemGetAllocationGranularity");
  require(library, api.MemCreate, "cuMemCreate");
  require(library, api.MemRelease, "cuMemRelease");
  require(library, api.MemExportToShareableHandle, "cuMemExportToShareableHandle");
  require(library, api.MemImportFromShareableHandle, "cuMemImportFromShareableHandle");
  require(library, api.MemAddressReserve, "cuMemAddressReserve");
  require(library, api.MemAddressFree, "cuMemAddressFree");
  require(library, api.MemMap, "cuMemMap");
  require(library, api.MemUnmap, "cuMemUnmap");
  require(library, api.MemSetAccess, "cuMemSetAccess");
  require(library, api.MemsetD8, "cuMemsetD8_v2");
  require(library, api.MemHostAlloc, "cuMemHostAlloc");
  require(library, api.MemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2");
  require(library, api.MemFreeHost, "cuMemFreeHost");
  require(library, api.ModuleLoadData, "cuModuleLoadData");
  require(library, api.ModuleUnload, "cuModuleUnload");
  require(library, api.ModuleGetFunction, "cuModuleGetFunction");
  require(library, api.LaunchKernel, "cuLaunchKernel");
  require(library, api.StreamSynchronize, "cuStreamSynchronize");
  find(library, api.DeviceGetUuid, "cuDeviceGetUuid_v2");
  find(library, api.MemHostRegister, "cuMemHostRegister_v2");
  find(library, api.MemHostUnregister, "cuMemHostUnregister");
  find(library, api.StreamWaitValue64, "cuStreamWaitValue64_v2");
  if (const int result = api.Init(0); result != 0) {
    throw ConfigError(fmt::format("[cuda_ipc] {} does not start (cuInit: error {}): {}", api.path,
                                  result, kOtherwise));
  }
  return api;
}

// What the wheels of NVIDIA put beside torch: nvidia/cu13/lib, and nvidia/cuda_nvrtc/lib before.
std::vector<std::string> compilers() {
  if (const auto asked = env_text("LOCKSTEP_NVRTC")) return {*asked};
  std::vector<std::string> paths;
  const auto wheels = libtorch_folder().parent_path().parent_path() / "nvidia";
  for (const char* file : {"libnvrtc.so.13", "libnvrtc.so.12"}) {
    for (const char* folder : {"cu13/lib", "cuda_nvrtc/lib"}) {
      const auto path = wheels / folder / file;
      if (std::filesystem::exists(path)) paths.push_back(path);
    }
  }
  paths.emplace_back("libnvrtc.so.13");
  paths.emplace_back("libnvrtc.so.12");
  return paths;
}

Compiler open_compiler() {
  const Library library =
      open_first(compilers(), "NVRTC", "let LOCKSTEP_NVRTC name a libnvrtc.so of CUDA 12 or 13");
  Compiler api{};
  api.path = library.path;
  require(library, api.GetErrorString, "nvrtcGetErrorString");
  require(library, api.CreateProgram, "nvrtcCreateProgram");
  require(library, api.DestroyProgram, "nvrtcDestroyProgram");
  require(library, api.CompileProgram, "nvrtcCompileProgram");
  require(library, api.GetProgramLogSize, "nvrtcGetProgramLogSize");
  require(library, api.GetProgramLog, "nvrtcGetProgramLog");
  require(library, api.GetCUBINSize, "nvrtcGetCUBINSize");
  require(library, api.GetCUBIN, "nvrtcGetCUBIN");
  return api;
}

}  // namespace

const Driver& driver() {
  static const Driver api = open_driver();
  return api;
}

const Compiler& compiler() {
  static const Compiler api = open_compiler();
  return api;
}

void check(int result, const char* call) {
  if (result == 0) return;
  const char* text = nullptr;
  if (driver().GetErrorString(result, &text) != 0 || text == nullptr) text = "an unknown error";
  throw CommError(fmt::format("{}: {} (error {})", call, text, result));
}

}  // namespace lockstep::comm::cuda_ipc
