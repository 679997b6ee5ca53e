// Checks of Lockstep on a real device. Each compares with the CPU, or with one process that knows
// nothing of ranks, and can run on the CPU itself, which shows that the check is right.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::on_gpu {

// All ranks run it together; it throws when something is wrong.
struct Check {
  std::string_view name;
  std::function<void(const World&)> run;
};

// Over `group`, which has the world's ranks.
std::vector<Check> collective_checks(const Group& group);
std::vector<Check> graph_checks(const Group& group);
std::vector<Check> training_checks();
std::vector<Check> precision_checks();
std::vector<Check> state_checks();

// Throw Error that says what differs and by how much. Tensors may be on any devices.
void expect_equal(std::string_view what, const at::Tensor& actual, const at::Tensor& expected);
void expect_close(std::string_view what, const at::Tensor& actual, const at::Tensor& expected,
                  double tolerance);
// Throws Error with `what` unless `holds`.
void expect(std::string_view what, bool holds);

// The world's device: of one process, too.
inline at::TensorOptions on(const World& world, at::ScalarType dtype) {
  return at::TensorOptions(world.device()).dtype(dtype);
}

// 8 rows of 16 numbers, of one rank and step: the same on every device. In float64, in which a
// device and the CPU differ in the last bits only.
at::Tensor batch_of(const World& world, int rank, int step);
// The batches of all ranks.
at::Tensor whole_batch(const World& world, int step);

// 16-64-64-4 with the same values on every rank, on the world's device.
torch::nn::Sequential small_net(const World& world, at::ScalarType dtype = at::kDouble);
at::Tensor flat(const std::vector<at::Tensor>& tensors);
// What somebody has who trains on all batches without Lockstep.
using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;
at::Tensor trained_bare(const World& world, const MakeOptimizer& make);

inline constexpr int kSteps = 8;

}  // namespace lockstep::on_gpu
