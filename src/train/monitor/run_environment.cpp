#include "train/monitor/run_environment.h"

#include <ATen/Parallel.h>
#include <sys/utsname.h>
#include <torch/version.h>
#include <unistd.h>

#include "core/process/processor.h"
#include "core/version.h"

namespace lockstep::train {
std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "";
}

std::map<std::string, std::string> run_environment(const comm::World& world) {
  std::map<std::string, std::string> all{
      {"Lockstep", std::string(version())},
      {"libtorch", TORCH_VERSION},
      {"ranks", world.describe()},
      {"transport", std::string(world.group().backend())},
      {"device", world.device().str()},
      {"threads of a rank", std::to_string(at::get_num_threads())},
      {"host of rank 0", host_name()},
  };
  if (const std::string name = processor_name(); !name.empty()) all["processor"] = name;
  utsname system{};
  if (uname(&system) == 0) all["system"] = std::string(system.sysname) + " " + system.release;
  return all;
}

}  // namespace lockstep::train
