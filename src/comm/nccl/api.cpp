#include "comm/nccl/api.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <vector>

#include "comm/host/libraries.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::nccl {
namespace {

constexpr const char* kFile = "libnccl.so.2";
// Since then a communicator can be made without blocking, so that a start can be aborted.
constexpr int kOldest = 21400;

std::vector<std::string> candidates() {
  if (const auto asked = env_text("LOCKSTEP_NCCL")) return {*asked};
  std::vector<std::string> paths;
  const auto wheel = libtorch_folder().parent_path().parent_path() / "nvidia/nccl/lib" / kFile;
  if (std::filesystem::exists(wheel)) paths.push_back(wheel);
  paths.emplace_back(kFile);
  return paths;
}

template <class Function>
void bind(void* library, Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

template <class Function>
void require(const Api& api, void* library, Function& function, const char* name) {
  bind(library, function, name);
  if (function != nullptr) return;
  throw ConfigError(fmt::format(
      "[nccl] {} has no {}: it must be NCCL {} or newer; let LOCKSTEP_NCCL name another, "
      "or set LOCKSTEP_DEVICE=cpu",
      api.path, name, version_text(kOldest)));
}

void bind_all(Api& api, void* library) {
  require(api, library, api.GetVersion, "ncclGetVersion");
  require(api, library, api.GetUniqueId, "ncclGetUniqueId");
  if (api.GetVersion(&api.version) != Success || api.version < kOldest) {
    throw ConfigError(
        fmt::format("[nccl] {} is NCCL {}, but {} is the oldest that can be used: let "
                    "LOCKSTEP_NCCL name another, "
                    "or set LOCKSTEP_DEVICE=cpu",
                    api.path, version_text(api.version), version_text(kOldest)));
  }
  require(api, library, api.CommInitRankConfig, "ncclCommInitRankConfig");
  require(api, library, api.CommFinalize, "ncclCommFinalize");
  require(api, library, api.CommDestroy, "ncclCommDestroy");
  require(api, library, api.CommAbort, "ncclCommAbort");
  require(api, library, api.CommGetAsyncError, "ncclCommGetAsyncError");
  require(api, library, api.GetErrorString, "ncclGetErrorString");
  require(api, library, api.GetLastError, "ncclGetLastError");
  require(api, library, api.GroupStart, "ncclGroupStart");
  require(api, library, api.GroupEnd, "ncclGroupEnd");
  require(api, library, api.AllReduce, "ncclAllReduce");
  require(api, library, api.Reduce, "ncclReduce");
  require(api, library, api.ReduceScatter, "ncclReduceScatter");
  require(api, library, api.AllGather, "ncclAllGather");
  require(api, library, api.Broadcast, "ncclBroadcast");
  require(api, library, api.Send, "ncclSend");
  require(api, library, api.Recv, "ncclRecv");
  bind(library, api.CommRegister, "ncclCommRegister");
  bind(library, api.CommDeregister, "ncclCommDeregister");
  bind(library, api.MemAlloc, "ncclMemAlloc");
  bind(library, api.MemFree, "ncclMemFree");
}

Api open() {
  std::vector<std::string> problems;
  for (const std::string& path : candidates()) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      problems.emplace_back(dlerror());
      continue;
    }
    Api api{};
    api.path = path;
    bind_all(api, library);
    // The library's own words for where it is, when the loader searched.
    Dl_info place{};
    if (dladdr(reinterpret_cast<void*>(api.GetVersion), &place) != 0) api.path = place.dli_fname;
    return api;
  }
  throw ConfigError(
      fmt::format("[nccl] no NCCL library can be opened ({}): install NCCL {} or newer, let "
                  "LOCKSTEP_NCCL name its libnccl.so.2, or set LOCKSTEP_DEVICE=cpu",
                  fmt::join(problems, "; "), version_text(kOldest)));
}

}  // namespace

const Api& load() {
  static const Api api = open();
  return api;
}

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace lockstep::comm::nccl
