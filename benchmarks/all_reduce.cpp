// all_reduce of float32 by size, as benchmarks/peers/allreduce.py measures Gloo: from the last
// rank's start to the last rank's end, each call after a fresh fill and a barrier. On the GPUs of
// the ranks where they have any (LOCKSTEP_DEVICE), until the device is done. Prints one JSON line
// on rank 0.
#include <lockstep/lockstep.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "device.h"

namespace {

using lockstep::World;

double now_us() {
  const auto now = std::chrono::steady_clock::now()
                       .time_since_epoch();  // one clock for all processes of a machine
  return std::chrono::duration<double, std::micro>(now).count();
}

// The median over `steps` calls, on rank 0.
double latency(const World& world, int steps, const std::function<void()>& fill,
               const std::function<void()>& call) {
  at::Tensor spans = at::empty({steps, 2}, at::kDouble);
  for (int i = -3; i < steps; ++i) {
    fill();
    bench::finish(world.device());
    world.group().barrier().wait();
    const double begin = now_us();
    call();
    bench::finish(world.device());
    const double end = now_us();
    if (i < 0) continue;
    spans[i][0] = begin;
    spans[i][1] = end;
  }
  at::Tensor all = at::empty({world.size(), steps, 2}, at::kDouble);
  world.group().all_gather(all, spans).wait();
  const auto last = std::get<0>(all.max(0));
  return (last.select(1, 1) - last.select(1, 0)).median().item<double>();
}

// What the same bytes cost without any partner: each rank reads, adds to and writes its own.
double read_add_write(const World& world, int steps, int64_t count) {
  at::Tensor data = at::empty({count}, world.device());
  return latency(
      world, steps, [&] { data.fill_(1); }, [&] { data.add_(1); });
}

}  // namespace

int main() try {
  at::set_num_threads(1);
  const World world = World::from_env();
  const auto& group = world.group();
  nlohmann::json rows = nlohmann::json::array();
  std::vector<int64_t> sizes{4, 8, 1024, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20};
  if (!world.device().is_cpu()) sizes.push_back(400 << 20);
  for (const int64_t bytes : sizes) {
    const int64_t count = bytes / 4;
    const int steps = bytes <= 64 << 10 ? 200 : bytes <= 1 << 20 ? 60 : 25;
    at::Tensor shared = group.empty({count}, world.device()),
               own = at::empty({count}, world.device());
    const auto time = [&](at::Tensor& data) {
      return latency(
          world, steps, [&] { data.fill_(1); }, [&] { group.all_reduce(data).wait(); });
    };
    const double in_place = time(shared), private_memory = time(own);
    rows.push_back({{"bytes", bytes},
                    {"in_place_us", in_place},
                    {"private_us", private_memory},
                    {"read_add_write_us", read_add_write(world, steps, count)}});
  }
  if (world.is_main()) {
    std::puts(nlohmann::json{{"world", world.size()},
                             {"backend", group.backend()},
                             {"device", world.device().str()},
                             {"rows", rows}}
                  .dump()
                  .c_str());
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
