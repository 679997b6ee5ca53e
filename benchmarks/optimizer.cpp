// One step of AdamW over 16 Mi parameters on one thread: libtorch's, the fused one, and a loop that
// moves the same bytes. Prints one JSON line.
#include <lockstep/parallel/fused_adam.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <vector>

namespace {

constexpr int64_t kElements = 16 << 20;

template <class Body>
double median_ms(const Body& body) {
  std::vector<double> times;
  body();
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    body();
    times.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
            .count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

template <class Optimizer>
double step_ms() {
  torch::manual_seed(0);
  at::Tensor parameter = torch::randn({kElements}, torch::requires_grad());
  parameter.mutable_grad() = torch::randn({kElements});
  Optimizer optimizer(std::vector<at::Tensor>{parameter}, torch::optim::AdamWOptions(1e-3));
  return median_ms([&] { optimizer.step(); });
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
  return median_ms([&] { move(data(0), data(1), data(2), data(3)); });
}

}  // namespace

int main() {
  at::set_num_threads(1);
  const nlohmann::json line = {{"elements", kElements},
                               {"torch_ms", step_ms<torch::optim::AdamW>()},
                               {"fused_ms", step_ms<lockstep::FusedAdamW>()},
                               {"floor_ms", floor_ms()}};
  std::puts(line.dump().c_str());
}
