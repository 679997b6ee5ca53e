// One step of AdamW over 16 Mi parameters on one thread: libtorch's, the fused one, and a loop that
// moves the same bytes. Prints one JSON line.
//   bench_optimizer [gpt]
// gpt: over the parameters of gpt.h's model of 125 million. On a GPU where there is one
// (LOCKSTEP_DEVICE); there the floor is copies of as many bytes.
#include <lockstep/comm/world.h>
#include <lockstep/parallel/fused_adam.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "device.h"
#include "gpt.h"

namespace {

constexpr int64_t kElements = 16 << 20;

using Shapes = std::vector<std::vector<int64_t>>;

Shapes shapes_of_gpt() {
  const bench::Gpt net(bench::kGpt125M);
  Shapes shapes;
  for (const auto& parameter : net->parameters()) shapes.push_back(parameter.sizes().vec());
  return shapes;
}

template <class Body>
double median_ms(at::Device device, const Body& body) {
  std::vector<double> times;
  body();
  for (int i = 0; i < (device.is_cpu() ? 5 : 30); ++i) {
    bench::finish(device);
    const auto start = std::chrono::steady_clock::now();
    body();
    bench::finish(device);
    times.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
            .count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

template <class Optimizer>
double step_ms(at::Device device, const Shapes& shapes) {
  torch::manual_seed(0);
  std::vector<at::Tensor> parameters;
  for (const auto& shape : shapes) {
    parameters.push_back(torch::randn(shape, device).requires_grad_());
    parameters.back().mutable_grad() = torch::randn(shape, device);
  }
  Optimizer optimizer(parameters, torch::optim::AdamWOptions(1e-3));
  return median_ms(device, [&] { optimizer.step(); });
}

// Reads four arrays and writes three, as AdamW has to, with next to no arithmetic.
__attribute__((target_clones("avx512f", "avx2", "default"))) void move(float* p, const float* g,
                                                                       float* m, float* v) {
#pragma GCC ivdep
  for (int64_t i = 0; i < kElements; ++i) {
    m[i] += g[i];
    v[i] += g[i];
    p[i] += m[i];
  }
}

// In memory as the optimizers' is.
double floor_ms() {
  std::vector<at::Tensor> arrays;
  for (int i = 0; i < 4; ++i) arrays.push_back(torch::randn({kElements}));
  const auto data = [&](int i) { return arrays[i].mutable_data_ptr<float>(); };
  return median_ms(at::kCPU, [&] { move(data(0), data(1), data(2), data(3)); });
}

// Reads and writes of seven arrays are those of three and a half copies.
double floor_ms(at::Device device, int64_t elements) {
  const at::Tensor from = torch::randn({elements}, device), to = at::empty_like(from);
  return 3.5 * median_ms(device, [&] { to.copy_(from); });
}

}  // namespace

int main(int argc, char** argv) try {
  at::set_num_threads(1);
  const auto world = lockstep::World::from_env();
  const at::Device device = world.device();
  const bool gpt = argc > 1 && argv[1] == std::string_view("gpt");
  const Shapes shapes = gpt ? shapes_of_gpt() : Shapes{{kElements}};
  int64_t elements = 0;
  for (const auto& shape : shapes) elements += c10::multiply_integers(shape);
  const bool plain = device.is_cpu() && !gpt;
  const nlohmann::json line = {{"elements", elements},
                               {"device", device.str()},
                               {"torch_ms", step_ms<torch::optim::AdamW>(device, shapes)},
                               {"fused_ms", step_ms<lockstep::FusedAdamW>(device, shapes)},
                               {"floor_ms", plain ? floor_ms() : floor_ms(device, elements)}};
  std::puts(line.dump().c_str());
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
