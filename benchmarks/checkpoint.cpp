// Saves and restores 384 MB (24 tensors of 16 MB) that all ranks have, and copies the same bytes in
// memory, or from a GPU to pinned memory where the ranks have any (LOCKSTEP_DEVICE). Prints one
// JSON line: seconds, each several times.
//   lockstep run --nproc-per-node 2 bench_checkpoint DIRECTORY [REPEATS [STEPS [TENSORS]]]
#include <fcntl.h>
#include <fmt/format.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "device.h"

namespace {

namespace fs = std::filesystem;
using lockstep::Checkpointer;
using lockstep::World;

struct Net : torch::nn::Module {
  explicit Net(int64_t tensors) {
    torch::manual_seed(0);
    for (int64_t i = 0; i < tensors; ++i) {
      layers.push_back(
          register_parameter(fmt::format("layer{}", i), torch::randn({4096, 1024}) * 0.03));
    }
  }
  // Two layers at a time: out to 4096 numbers and back.
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i + 1 < layers.size(); i += 2) {
      x = x + at::matmul(torch::relu(at::matmul(x, layers[i].t())), layers[i + 1]);
    }
    return x;
  }
  std::vector<at::Tensor> layers;
};

template <class Body>
double seconds(const World& world, const Body& body) {
  bench::finish(world.device());
  world.group().barrier().wait();
  const auto begin = std::chrono::steady_clock::now();
  body();
  bench::finish(world.device());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The slowest rank's.
double slowest(const World& world, double own) {
  const auto time = at::scalar_tensor(own, at::kDouble);
  world.group().all_reduce(time, lockstep::ReduceOp::Max).wait();
  return time.item<double>();
}

// Drops files from the page cache.
void forget(const fs::path& folder) {
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const int fd = open(entry.path().c_str(), O_RDONLY);
    fsync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
  }
}

// Untimed: older checkpoints, so that the disk does not fill.
void remove_steps(const World& world, const fs::path& directory, bool all) {
  world.group().barrier().wait();
  if (!world.is_main() || !fs::exists(directory)) return;
  std::vector<fs::path> steps;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.path().filename().string().starts_with("step-")) steps.push_back(entry.path());
  }
  std::sort(steps.begin(), steps.end());
  if (!all && !steps.empty()) steps.pop_back();
  for (const auto& path : steps) fs::remove_all(path);
}

// This rank's share, asynchronously.
void copy_from_device(const Net& net, lockstep::Range own, const at::Tensor& memory) {
  int64_t place = 0;
  for (const auto& layer : net.layers) {
    const auto begin = std::max(own.begin, place);
    const auto end = std::min<int64_t>(own.end, place + (16 << 20));
    if (begin < end) {
      const at::Tensor bytes = layer.detach().view({-1}).view(at::kByte);
      memory.narrow(0, begin - own.begin, end - begin)
          .copy_(bytes.narrow(0, begin - place, end - begin), /*non_blocking=*/true);
    }
    place += 16 << 20;
  }
}

// This rank's share, into memory that is there.
double copied(const World& world, const Net& net) {
  const auto bytes = static_cast<int64_t>(net.layers.size()) * (16 << 20);
  const auto own = lockstep::Shard{world.rank(), world.size()}.of(bytes);
  // Never freed: when static objects are destroyed CUDA has no streams any more.
  static const at::Tensor& memory = *new at::Tensor(at::zeros(
      {own.end - own.begin}, at::TensorOptions(at::kByte).pinned_memory(!world.device().is_cpu())));
  if (!world.device().is_cpu()) {
    return slowest(world, seconds(world, [&] { copy_from_device(net, own, memory); }));
  }
  return slowest(world, seconds(world, [&] {
                   char* to = static_cast<char*>(memory.mutable_data_ptr());
                   int64_t place = 0;
                   for (const auto& layer : net.layers) {
                     const auto begin = std::max(own.begin, place);
                     const auto end = std::min<int64_t>(own.end, place + (16 << 20));
                     if (begin < end) {
                       std::memcpy(to,
                                   static_cast<const char*>(layer.const_data_ptr()) + begin - place,
                                   end - begin);
                       to += end - begin;
                     }
                     place += 16 << 20;
                   }
                 }));
}

void measure(const World& world, const fs::path& directory, int repeats, int64_t steps,
             int64_t tensors) {
  Net net(tensors);
  net.to(world.device());
  nlohmann::json line;
  int64_t step = 0;
  {
    Checkpointer checkpoints(world, directory / "sync");
    checkpoints.track("net", net);
    for (int i = 0; i < repeats + 1; ++i) {
      const double copy = copied(world, net);
      const double save = slowest(world, seconds(world, [&] { checkpoints.save(++step); }));
      if (i > 0) line["copy_s"].push_back(copy);  // the first ones have page faults
      if (i > 0) line["save_s"].push_back(save);
      remove_steps(world, directory / "sync", false);
    }
    for (int i = 0; i < repeats; ++i) {
      for (const bool cold : {true, false}) {
        if (cold && world.is_main()) forget(directory / "sync");
        line[cold ? "load_cold_s" : "load_warm_s"].push_back(
            slowest(world, seconds(world, [&] { checkpoints.restore_latest(); })));
      }
    }
  }
  remove_steps(world, directory / "sync", true);

  Checkpointer behind(world, directory / "async", {.async = true});
  behind.track("net", net);
  for (int i = 0; i < repeats + 1; ++i) {
    const double copy = copied(world, net);
    const double held = slowest(world, seconds(world, [&] { behind.save(++step); }));
    behind.finish();
    if (i > 0) line["copy_before_async_s"].push_back(copy);
    if (i > 0) line["held_up_s"].push_back(held);
    remove_steps(world, directory / "async", false);
  }
  if (steps > 0) {
    lockstep::Ddp ddp(net, world);
    torch::optim::SGD sgd(net.parameters(), 1e-4);
    const at::Tensor x = torch::randn({16, 1024}).to(world.device());
    const auto run = [&](bool saves) {
      const double time = slowest(world, seconds(world, [&] {
                                    for (int64_t i = 0; i < steps; ++i) {
                                      ddp.zero_grad();
                                      net.forward(x).square().mean().backward();
                                      sgd.step();
                                      if (saves && i == 0) behind.save(++step);
                                    }
                                  }));
      behind.finish();
      remove_steps(world, directory / "async", false);
      return time;
    };
    run(true);
    for (int i = 0; i < repeats; ++i) {
      line["run_s"].push_back(run(false));
      line["run_saving_s"].push_back(run(true));
    }
  }
  remove_steps(world, directory / "async", true);
  line["ranks"] = world.size();
  line["device"] = world.device().str();
  line["mb"] = 16 * tensors;
  if (world.is_main()) fmt::print("{}\n", line.dump());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const auto number = [&](int i, int64_t other) { return argc > i ? std::stol(argv[i]) : other; };
  measure(World::from_env(), argv[1], static_cast<int>(number(2, 5)), number(3, 0), number(4, 24));
}
