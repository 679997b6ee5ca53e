#include "lockstep/plan/bench.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <vector>

#include "lockstep/core/error.h"
#include "plan/measure/timing.h"

namespace lockstep::plan {
namespace {

using Clock = std::chrono::steady_clock;
using Call = std::function<void()>;

constexpr int kFewest = 5, kMost = 2000;
constexpr int64_t kFewestBytes = 1 << 10;  // of the smallest collective

double product_flops(const comm::Group& group, at::ScalarType dtype, double budget) {
  constexpr int64_t kSize = 512;
  const at::Tensor a = at::ones({kSize, kSize}, dtype), b = at::ones({kSize, kSize}, dtype);
  at::Tensor c = at::empty({kSize, kSize}, dtype);
  return 2.0 * kSize * kSize * kSize / seconds_of(group, budget, [&] { at::mm_out(c, a, b); });
}

double resident_bytes() {
  std::ifstream file("/proc/self/statm");
  double pages = 0;
  file >> pages >> pages;
  return pages * static_cast<double>(sysconf(_SC_PAGESIZE));
}

void measure_collectives(const comm::Group& group, const BenchOptions& options, Machine& machine) {
  const int64_t ranks = group.size();
  for (int64_t bytes = kFewestBytes; bytes <= options.largest_bytes; bytes *= 8) {
    const int64_t part = std::max<int64_t>(1, bytes / 4 / ranks);
    const at::Tensor whole = group.empty({part * ranks}).zero_(),
                     own = whole.narrow(0, part * group.rank(), part);
    const auto add = [&](std::vector<MeasuredCollective>& to, const Call& call) {
      to.push_back(
          {static_cast<double>(whole.nbytes()), seconds_of(group, options.seconds_each / 4, call)});
    };
    add(machine.all_reduce,
        [&] { group.all_reduce(whole, comm::ReduceOp::Sum, kBenchLabel).wait(); });
    add(machine.all_gather, [&] { group.all_gather(whole, own, kBenchLabel).wait(); });
    add(machine.reduce_scatter,
        [&] { group.reduce_scatter(own, whole, comm::ReduceOp::Sum, kBenchLabel).wait(); });
  }
  const auto& last = machine.all_reduce.back();
  const auto count = static_cast<double>(ranks);
  machine.device.local_bandwidth = 2 * last.bytes * (count - 1) / count / last.seconds;
  machine.device.shares_memory = group.shared({1}).defined();
}

double seconds_of_one(const Call& call) {
  const auto begin = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

double largest_of_ranks(const comm::Group& group, double value) {
  const at::Tensor one = at::full({1}, value, at::kDouble);
  group.all_reduce(one, comm::ReduceOp::Max, kBenchLabel).wait();
  return one.item<double>();
}

double seconds_of(const comm::Group& group, double budget, const Call& call) {
  call();  // memory is touched, kernels are chosen
  const double first = largest_of_ranks(group, seconds_of_one(call));
  const auto count =
      static_cast<int>(std::clamp<double>(budget / std::max(first, 1e-7), kFewest, kMost));
  std::vector<double> seconds;
  for (int i = 0; i < count; ++i) {
    group.barrier(kBenchLabel).wait();
    seconds.push_back(seconds_of_one(call));
  }
  const auto middle = seconds.begin() + count / 2;
  std::ranges::nth_element(seconds, middle);
  return largest_of_ranks(group, *middle);
}

Machine measure_machine(const comm::World& world, const BenchOptions& options) {
  if (!world.device().is_cpu()) {
    throw ConfigError(
        "[bench] measures ranks on CPUs; for GPUs give lockstep plan their name (lockstep plan "
        "--devices lists them)");
  }
  if (!(options.seconds_each >= 0) || options.largest_bytes < kFewestBytes) {
    throw ConfigError(
        fmt::format("[bench] {} seconds each and collectives of up to {} bytes: give at least 0 "
                    "seconds and {} bytes",
                    options.seconds_each, options.largest_bytes, kFewestBytes));
  }
  if (world.local_size() != world.size()) {
    throw ConfigError("[bench] measures the ranks of one node: start them on one host");
  }
  const at::NoGradGuard no_grad;
  const comm::Group group = world.group();
  Machine machine = this_host();
  Device& device = machine.device;
  device.name = "measured";
  device.source = "lockstep bench";
  machine.is_measured = true;
  machine.all_reduce.clear();
  machine.devices_per_node = world.size();
  device.float_flops = product_flops(group, at::kFloat, options.seconds_each);
  device.narrow_flops = product_flops(group, at::kBFloat16, options.seconds_each);
  // Of libraries, with what they have taken for kernels.
  device.reserved_bytes = largest_of_ranks(group, resident_bytes());
  constexpr int64_t kCopied = 64 << 20;  // beyond the caches
  {
    const at::Tensor from = at::ones({kCopied / 4}), to = at::zeros({kCopied / 4});
    device.memory_bandwidth =
        2.0 * kCopied / seconds_of(group, options.seconds_each, [&] { to.copy_(from); });
  }
  if (world.size() > 1) measure_collectives(group, options, machine);
  return machine;
}

}  // namespace lockstep::plan
