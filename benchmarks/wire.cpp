// all_reduce of float32 as ranks on several hosts see it: how long, how many bytes leave a host,
// and a checksum of the result, which every transport and number of hosts must have in common.
//   wire BYTES STEPS
// Prints one JSON line on rank 0.
#include <lockstep/lockstep.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace {

using lockstep::World;

// Bytes that this host has sent through all interfaces but the loopback one.
int64_t bytes_sent() {
  std::ifstream file("/proc/self/net/dev");
  std::string line;
  int64_t sum = 0;
  while (std::getline(file, line)) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || line.substr(0, colon).find("lo") != std::string::npos)
      continue;
    std::istringstream fields(line.substr(colon + 1));
    std::vector<int64_t> values;
    for (int64_t value; fields >> value;) values.push_back(value);
    sum += values.at(8);  // after eight columns of what was received
  }
  return sum;
}

// Numbers of very different size, so that another order of summation gives other bits.
at::Tensor rough(int64_t count, int rank) {
  auto generator = at::detail::createCPUGenerator(1000 + rank);
  return at::randn({count}, generator).mul_(at::randn({count}, generator).exp_());
}

std::string checksum(const at::Tensor& data) {
  uint64_t hash = 14695981039346656037ull;
  const auto* bytes = static_cast<const unsigned char*>(data.const_data_ptr());
  for (size_t i = 0; i < data.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211ull;
  return std::to_string(hash);
}

nlohmann::json measure(const World& world, int64_t count, int steps) {
  const auto& group = world.group();
  const at::Tensor mine = rough(count, world.rank());
  const at::Tensor data = group.empty({count});
  std::vector<double> ms;
  int64_t sent = 0;
  for (int i = -2; i < steps; ++i) {
    data.copy_(mine);
    group.barrier().wait();
    if (i == 0) sent = bytes_sent();
    const auto begin = std::chrono::steady_clock::now();
    group.all_reduce(data).wait();
    const std::chrono::duration<double, std::milli> own = std::chrono::steady_clock::now() - begin;
    at::Tensor slowest = at::full({1}, own.count(), at::kDouble);
    group.all_reduce(slowest, lockstep::ReduceOp::Max).wait();
    if (i >= 0) ms.push_back(slowest.item<double>());
  }
  group.barrier().wait();
  sent = (bytes_sent() - sent) / steps;
  std::sort(ms.begin(), ms.end());
  return {{"world", world.size()},
          {"backend", group.backend()},
          {"ms", ms[ms.size() / 2]},
          {"sent_by_host_0", sent},
          {"checksum", checksum(data)}};
}

}  // namespace

int main(int argc, char** argv) try {
  at::set_num_threads(1);
  const World world = World::from_env();
  if (argc != 3) {
    std::fprintf(stderr, "usage: wire BYTES STEPS\n");
    return 2;
  }
  const auto line = measure(world, std::atoll(argv[1]) / 4, std::max(1, std::atoi(argv[2])));
  if (world.is_main()) std::puts(line.dump().c_str());
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
