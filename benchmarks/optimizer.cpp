// One step of AdamW over 16 Mi parameters on one thread: libtorch's, the fused one, and a loop that moves the same bytes. Prints
// one JSON line.
#include <lockstep/parallel/fused_adam.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

namespace {

constexpr int64_t kElements = 16 << 20;

template <class Body>
double median_ms(const Body& body) {
  std::vector<double> times;
  body();
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    body();
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
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
double floor_ms() {
  std::vector<float> p(kElements, 1), g(kElements, 1), m(kElements, 1), v(kElements, 1);
  return median_ms([&] {
    float *pp = p.data(), *mm = m.data(), *vv = v.data();
    const float* gg = g.data();
#pragma GCC ivdep
    for (int64_t i = 0; i < kElements; ++i) {
      mm[i] += gg[i];
      vv[i] += gg[i];
      pp[i] += mm[i];
    }
  });
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
