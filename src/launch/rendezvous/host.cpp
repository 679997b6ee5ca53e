#include "launch/rendezvous/host.h"

#include <dirent.h>
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <memory>

#include "core/number.h"
#include "core/process/cores.h"
#include "launch/job/run.h"
#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

constexpr int kMostRanks = 4096;

// The driver's device nodes, so that no GPU library has to be loaded; fewer when the user hides
// some.
int gpus() {
  const std::unique_ptr<DIR, int (*)(DIR*)> devices(opendir("/dev"), closedir);
  int count = 0;
  while (const dirent* entry = devices ? readdir(devices.get()) : nullptr) {
    const std::string_view name = entry->d_name;
    if (name.size() <= 6 || !name.starts_with("nvidia")) continue;
    count += std::all_of(name.begin() + 6, name.end(), [](unsigned char c) { return isdigit(c); });
  }
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return count;
  const std::string_view list = visible;
  if (list.empty() || list == "-1") return 0;
  return std::min(count, 1 + static_cast<int>(std::count(list.begin(), list.end(), ',')));
}

}  // namespace

int cores() { return std::max(1, static_cast<int>(allowed_cores().size())); }

int count_ranks(std::string_view text) {
  if (text == "cpu") return cores();
  if (text == "gpu" || text == "auto") {
    const int found = gpus();
    if (found > 0) return found;
    if (text == "auto") return cores();
    throw ConfigError(
        "[run] --nproc-per-node gpu: no NVIDIA device is visible here (/dev/nvidia0, "
        "CUDA_VISIBLE_DEVICES); give a number, or cpu for one rank per core");
  }
  const auto value = whole_number_from<int>(text);
  if (!value || *value < 1 || *value > kMostRanks) {
    throw ConfigError(
        fmt::format("[run] --nproc-per-node '{}': give a number from 1 to {}, or auto, cpu, gpu",
                    text, kMostRanks));
  }
  return *value;
}

}  // namespace lockstep::launch
