#include "comm/host/libraries.h"

#include <ATen/Context.h>
#include <dlfcn.h>

namespace lockstep::comm {

std::filesystem::path libtorch_folder() {
  Dl_info place{};
  // Any function of libtorch_cpu does.
  if (dladdr(reinterpret_cast<void*>(&at::globalContext), &place) == 0) return {};
  return std::filesystem::absolute(place.dli_fname).parent_path();
}

}  // namespace lockstep::comm
