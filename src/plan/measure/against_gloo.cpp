#include "plan/measure/against_gloo.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/functional.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "lockstep/core/error.h"
#include "lockstep/models/mlp.h"
#include "lockstep/parallel/ddp.h"
#include "plan/measure/timing.h"
#include "plan/words.h"

namespace lockstep::plan {
namespace {

using Json = nlohmann::ordered_json;

void check(const comm::World& world) {
  if (!world.device().is_cpu()) {
    throw ConfigError("[bench] Gloo is for ranks on CPUs: set LOCKSTEP_DEVICE=cpu");
  }
  if (world.size() < 2) {
    throw ConfigError("[bench] one rank sends nothing: give --nproc-per-node 2 or more");
  }
}

// A step of a perceptron of these widths, with Ddp or without.
double seconds_of_step(const comm::World& world, const comm::Group* group,
                       const std::vector<int64_t>& widths, int64_t batch, double budget) {
  torch::manual_seed(1);  // the same weights on all ranks
  models::Mlp net(models::MlpOptions{.sizes = widths});
  std::optional<parallel::Ddp> ddp;
  if (group != nullptr) ddp.emplace(net, *group);
  torch::optim::SGD sgd(net->parameters(), 1e-3);
  const at::Tensor x = at::randn({batch, widths.front()}),
                   y = at::randint(widths.back(), {batch}, at::kLong);
  return seconds_of(world.group(), budget, [&] {
    ddp ? ddp->zero_grad() : sgd.zero_grad();
    torch::nn::functional::cross_entropy(net->forward(x), y).backward();
    sgd.step();
  });
}

int64_t parameters_of(const std::vector<int64_t>& widths) {
  int64_t count = 0;
  for (size_t i = 0; i + 1 < widths.size(); ++i) count += (widths[i] + 1) * widths[i + 1];
  return count;
}

std::string times_text(double ours, double theirs) { return fmt::format("{:.1f}x", theirs / ours); }

std::string heading(const char* what, const comm::World& world) {
  return fmt::format("{}; {}; medians, of the slowest rank\n", what, world.describe());
}

Json document(const char* what, const comm::World& world) {
  return {{"bench", what},
          {"ranks", world.size()},
          {"backend", world.group().backend()},
          {"rows", Json::array()}};
}

}  // namespace

std::vector<AllReduceTimes> compare_all_reduce(const comm::World& world, const comm::World& gloo,
                                               const BenchOptions& options) {
  check(world);
  const at::NoGradGuard no_grad;
  std::vector<AllReduceTimes> out;
  for (const int64_t bytes : {4, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20, 25 << 20}) {
    if (bytes > options.largest_bytes) break;
    const at::Tensor shared = world.group().empty({bytes / 4}).zero_(),
                     own = at::zeros({bytes / 4});
    const auto time = [&](const comm::Group& group, const at::Tensor& tensor) {
      return seconds_of(world.group(), options.seconds_each,
                        [&] { group.all_reduce(tensor, comm::ReduceOp::Sum, kBenchLabel).wait(); });
    };
    out.push_back({.bytes = bytes,
                   .group_memory = time(world.group(), shared),
                   .own_memory = time(world.group(), own),
                   .gloo = time(gloo.group(), own)});
  }
  return out;
}

std::vector<DdpTimes> compare_ddp(const comm::World& world, const comm::World& gloo,
                                  const BenchOptions& options) {
  check(world);
  constexpr int64_t kBatch = 64;
  std::vector<DdpTimes> out;
  for (const std::vector<int64_t>& widths :
       {std::vector<int64_t>{784, 256, 10}, std::vector<int64_t>{1024, 1024, 1024, 1024, 10}}) {
    const int64_t count = parameters_of(widths);
    if (4 * count > options.largest_bytes) break;
    const auto time = [&](const comm::Group* group) {
      return seconds_of_step(world, group, widths, kBatch, options.seconds_each);
    };
    out.push_back({.model = fmt::format("mlp {}", fmt::join(widths, "-")),
                   .parameters = count,
                   .batch = kBatch,
                   .alone = time(nullptr),
                   .ours = time(&world.group()),
                   .gloo = time(&gloo.group())});
  }
  return out;
}

std::string text_of(const std::vector<AllReduceTimes>& times, const comm::World& world) {
  std::vector<std::vector<std::string>> rows = {
      {"size", "group memory", "own memory", "Gloo", "faster", "with own memory"}};
  for (const auto& t : times) {
    rows.push_back(
        {t.bytes < 1024 ? fmt::format("{} B", t.bytes) : bytes_text(static_cast<double>(t.bytes)),
         seconds_text(t.group_memory), seconds_text(t.own_memory), seconds_text(t.gloo),
         times_text(t.group_memory, t.gloo), times_text(t.own_memory, t.gloo)});
  }
  return heading("all_reduce of float32", world) + table_text(rows, 0);
}

std::string text_of(const std::vector<DdpTimes>& times, const comm::World& world) {
  std::vector<std::vector<std::string>> rows = {
      {"model", "parameters", "batch", "without Ddp", "Ddp", "over Gloo", "faster"}};
  for (const auto& t : times) {
    rows.push_back({t.model, count_text(static_cast<double>(t.parameters)), std::to_string(t.batch),
                    seconds_text(t.alone), seconds_text(t.ours), seconds_text(t.gloo),
                    times_text(t.ours, t.gloo)});
  }
  return heading("a training step with SGD", world) + table_text(rows, 0);
}

std::string json_of(const std::vector<AllReduceTimes>& times, const comm::World& world) {
  Json out = document("all_reduce", world);
  for (const auto& t : times) {
    out["rows"].push_back({{"bytes", t.bytes},
                           {"group_memory_seconds", t.group_memory},
                           {"own_memory_seconds", t.own_memory},
                           {"gloo_seconds", t.gloo}});
  }
  return out.dump(2) + "\n";
}

std::string json_of(const std::vector<DdpTimes>& times, const comm::World& world) {
  Json out = document("ddp", world);
  for (const auto& t : times) {
    out["rows"].push_back({{"model", t.model},
                           {"parameters", t.parameters},
                           {"batch", t.batch},
                           {"without_ddp_seconds", t.alone},
                           {"ddp_seconds", t.ours},
                           {"gloo_seconds", t.gloo}});
  }
  return out.dump(2) + "\n";
}

}  // namespace lockstep::plan
