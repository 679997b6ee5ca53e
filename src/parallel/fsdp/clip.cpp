// Fsdp::clip_grad_norm_().
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "core/divided_up.h"
#include "lockstep/core/error.h"
#include "parallel/fsdp/state.h"

namespace lockstep::parallel {
namespace {

// Elements of a parameter whose norm is taken at once. Shards are cut at multiples of it, so that
// each of these belongs to one rank, for any number of ranks.
constexpr int64_t kCell = 1024;

int64_t cells_of(int64_t numel) { return divided_up(numel, kCell); }

// The 2-norm of up to kCell elements. Sixteen sums side by side, each in one order, are the same
// bits on every processor; libtorch's norm in float64 of float32 numbers takes them one after
// another.
template <class T>
double norm_of_cell(const T* values, int64_t count) {
  constexpr int64_t kSums = 16;
  std::array<double, kSums> sums{};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int64_t lane = 0; lane < kSums; ++lane) {
      const auto value = static_cast<double>(static_cast<at::opmath_type<T>>(values[i + lane]));
      sums[static_cast<size_t>(lane)] += value * value;
    }
  }
  for (; i < count; ++i) {
    const auto value = static_cast<double>(static_cast<at::opmath_type<T>>(values[i]));
    sums[static_cast<size_t>(i % kSums)] += value * value;
  }
  return std::sqrt(std::accumulate(sums.begin(), sums.end(), 0.0));
}

// The p-norm of each cell, in float64, into `cells`.
void write_norms(const at::Tensor& gradient, double p, const at::Tensor& cells) {
  const int64_t numel = gradient.numel();
  // A program may have put another tensor in a gradient's place.
  const at::Tensor values = (gradient.is_complex() ? gradient.abs() : gradient).contiguous();
  if (values.is_cpu() && p == 2) {
    double* const norms = cells.data_ptr<double>();
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, values.scalar_type(), "clip_grad_norm_", [&] {
          const scalar_t* const data = values.const_data_ptr<scalar_t>();
          at::parallel_for(0, cells_of(numel), 32, [&](int64_t begin, int64_t end) {
            for (int64_t cell = begin; cell < end; ++cell) {
              const int64_t at = cell * kCell;
              norms[cell] = norm_of_cell(data + at, std::min(kCell, numel - at));
            }
          });
        });
    return;
  }
  const int64_t whole = numel / kCell, rest = numel % kCell;
  const auto write = [&](int64_t first, int64_t rows, int64_t size) {
    at::Tensor norms = cells.narrow(0, first, rows);
    at::linalg_vector_norm_out(norms,
                               values.narrow(0, first * kCell, rows * size).view({rows, size}), p,
                               at::IntArrayRef{1}, false, at::kDouble);
  };
  if (whole > 0) write(0, whole, kCell);
  if (rest > 0) write(whole, 1, rest);
}

}  // namespace

at::Tensor Fsdp::clip_grad_norm_(double max_norm, double norm_type) {
  if (!(norm_type > 0) || !(max_norm >= 0)) {
    throw ConfigError(fmt::format(
        "[fsdp] clip_grad_norm_ with max_norm = {} and norm_type = {}: the first must not be "
        "below, the second must be above 0 (infinity for the largest magnitude)",
        max_norm, norm_type));
  }
  const at::NoGradGuard no_grad;
  state_->drop_cleared();
  auto all = shards();
  std::erase_if(all, [](const FsdpShard& each) { return !each.shard.requires_grad(); });
  int64_t count = 0;
  bool is_wide = false;
  for (const FsdpShard& each : all) {
    count += cells_of(c10::multiply_integers(each.sizes));
    is_wide = is_wide || c10::toRealValueType(each.shard.scalar_type()) == at::kDouble;
  }
  const at::Device device = all.empty() ? at::Device(at::kCPU) : all.front().shard.device();
  // In the module's order: the units a program chooses change no bit of the norm.
  const at::Tensor cells = at::zeros({count}, at::TensorOptions(at::kDouble).device(device));
  std::vector<at::Tensor> gradients;
  int64_t place = 0;
  for (const FsdpShard& each : all) {
    const at::Tensor& gradient = each.shard.grad();
    if (gradient.defined() && gradient.numel() > 0) {
      gradients.push_back(gradient);
      write_norms(gradient, norm_type,
                  cells.narrow(0, place + each.begin / kCell, cells_of(gradient.numel())));
    }
    place += cells_of(c10::multiply_integers(each.sizes));
  }
  const Group& group = state_->plan().shards;
  group.all_reduce(cells, ReduceOp::Sum, {.label = "clip_grad_norm_"}).wait();
  const at::Tensor norm =
      (count > 0 ? at::linalg_vector_norm(cells, norm_type) : at::zeros({}, cells.options()))
          .to(is_wide ? at::kDouble : at::kFloat);
  // As Python rounds max_norm / (norm + 1e-6).
  const at::Tensor factor = ((norm + 1e-6).reciprocal() * max_norm).clamp_max(1.0);
  const bool unchanged = factor.is_cpu() && factor.item<double>() == 1;
  if (!gradients.empty() && !unchanged) at::_foreach_mul_(gradients, factor);
  return norm;
}

}  // namespace lockstep::parallel
