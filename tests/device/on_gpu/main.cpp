// Runs the checks: lockstep run --nproc-per-node gpu on_gpu [--device cpu] [--list] [CHECK...]
//
// Prints "good NAME (N ms)" for each, or "FAILED NAME: why". Several ranks end with the first that
// fails, since the others wait for them; one rank goes on.
#include <chrono>
#include <cstdio>
#include <exception>
#include <set>

#include "device/nccl/of_one.h"
#include "lockstep/core/error.h"
#include "on_gpu/checks.h"

namespace lockstep::on_gpu {

void expect(std::string_view what, bool holds) {
  if (!holds) throw Error(std::string(what));
}

void expect_close(std::string_view what, const at::Tensor& actual, const at::Tensor& expected,
                  double tolerance) {
  const std::string name(what);
  expect(name + ": other shapes or dtypes",
         actual.sizes() == expected.sizes() && actual.scalar_type() == expected.scalar_type());
  const auto wide = [](const at::Tensor& tensor) { return tensor.detach().cpu().to(at::kDouble); };
  const double most =
      actual.numel() == 0 ? 0 : (wide(actual) - wide(expected)).abs().max().item<double>();
  // NaN is not close.
  expect(name + " differs by " + std::to_string(most), most <= tolerance);
}

void expect_equal(std::string_view what, const at::Tensor& actual, const at::Tensor& expected) {
  const at::Tensor here = actual.detach().cpu(), there = expected.detach().cpu();
  if (here.scalar_type() == there.scalar_type() && at::equal(here, there)) return;
  expect_close(what, actual, expected, 0);
  throw Error(std::string(what) + " differs");
}

at::Tensor batch_of(const World& world, int rank, int step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + rank));
  return at::randn({8, 16}, generator, at::kDouble).to(world.device());
}

at::Tensor whole_batch(const World& world, int step) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < world.size(); ++rank) parts.push_back(batch_of(world, rank, step));
  return at::cat(parts);
}

torch::nn::Sequential small_net(const World& world, at::ScalarType dtype) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 64),
                            torch::nn::Tanh(), torch::nn::Linear(64, 4));
  net->to(world.device(), dtype);
  return net;
}

at::Tensor flat(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts;
  for (const auto& tensor : tensors) parts.push_back(tensor.detach().reshape({-1}).cpu());
  return at::cat(parts);
}

at::Tensor trained_bare(const World& world, const MakeOptimizer& make) {
  auto net = small_net(world);
  const auto optimizer = make(net->parameters());
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    net->forward(whole_batch(world, step)).square().mean().backward();
    optimizer->step();
  }
  return flat(net->parameters());
}

namespace {

std::vector<Check> all_checks(const Group& group) {
  std::vector<Check> all;
  for (const auto& part : {collective_checks(group), graph_checks(group), training_checks(),
                           precision_checks(), state_checks()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

int usage() {
  std::fprintf(stderr, "use: on_gpu [--device cpu|cuda] [--list] [CHECK...]\n");
  return 2;
}

// Whether it passed, on this rank.
bool passes(const Check& check, const World& world) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    check.run(world);
    world.group().barrier().wait();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FAILED %s: %s\n", std::string(check.name).c_str(), error.what());
    return false;
  }
  const auto took = std::chrono::steady_clock::now() - begin;
  if (world.is_main()) {
    std::printf("good %s (%lld ms)\n", std::string(check.name).c_str(),
                static_cast<long long>(
                    std::chrono::duration_cast<std::chrono::milliseconds>(took).count()));
    std::fflush(stdout);
  }
  return true;
}

int run_checks(comm::DeviceKind device, const std::set<std::string, std::less<>>& names) {
  const World world = World::from_env({.device = device});
  const bool alone = world.size() == 1 && !world.device().is_cpu();
  const Group group = alone ? test::nccl_of_one(world.device()) : world.group();
  world.main_out() << world.describe() << ", " << world.device().str() << "; collectives over "
                   << group.backend() << std::endl;
  bool good = true;
  for (const Check& check : all_checks(group)) {
    if (!names.empty() && !names.contains(check.name)) continue;
    good = passes(check, world) && good;
    if (!good && world.size() > 1) return 1;
  }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace lockstep::on_gpu

int main(int argc, char** argv) {
  using namespace lockstep;
  auto device = comm::DeviceKind::Cuda;
  std::set<std::string, std::less<>> names, known;
  for (const auto& check : on_gpu::all_checks({})) known.insert(std::string(check.name));
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--list") {
      for (const auto& check : on_gpu::all_checks({}))
        std::printf("%s\n", std::string(check.name).c_str());
      return 0;
    }
    if (word == "--device" && i + 1 < argc && (argv[i + 1] == std::string_view("cpu"))) {
      device = comm::DeviceKind::Cpu;
      ++i;
    } else if (word == "--device" && i + 1 < argc && argv[i + 1] == std::string_view("cuda")) {
      ++i;
    } else if (known.contains(word)) {
      names.insert(std::string(word));
    } else {
      std::fprintf(stderr, "no check is called '%s': --list shows them\n", argv[i]);
      return on_gpu::usage();
    }
  }
  try {
    return on_gpu::run_checks(device, names);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
