#include "parallel/lanes/rules.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/csrc/jit/api/function_impl.h>

#include <utility>

#include "comm/host/threads.h"
#include "comm/transport.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/parallel/comm_hook.h"
#include "lockstep/parallel/determinism.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "parallel/nn/batch_norm_override.h"

namespace lockstep::parallel {
namespace {

template <size_t D>
bool is_synchronised(const torch::nn::Module& layer) {
  return layer.as<SyncBatchNormImpl<D>>() != nullptr;
}

bool has_sync_batch_norm(const ModuleRef& module) {
  if (module.module() == nullptr || module.has_expired()) return false;
  const auto is_one = [](const torch::nn::Module& layer) {
    return is_synchronised<1>(layer) || is_synchronised<2>(layer) || is_synchronised<3>(layer) ||
           batch_norm_ranks(layer) > 1;
  };
  if (is_one(*module.module())) return true;
  for (const auto& layer : module.module()->modules(/*include_self=*/false)) {
    if (is_one(*layer)) return true;
  }
  return false;
}

// Of what differs between this rank and another; the processor itself only chooses kernels.
bool is_decisive(const std::string& difference) { return !difference.starts_with("processor:"); }

// A report, as a string to send.
std::string packed(const DeterminismReport& report) {
  std::string text;
  for (const auto& [name, value] : report.items) text += name + '\t' + value + '\n';
  return text;
}

DeterminismReport unpacked(const std::string& text) {
  DeterminismReport report;
  for (size_t at = 0; at < text.size();) {
    const size_t tab = text.find('\t', at), end = text.find('\n', at);
    report.items.emplace_back(text.substr(at, tab - at), text.substr(tab + 1, end - tab - 1));
    at = end + 1;
  }
  return report;
}

}  // namespace

LaneOptions lane_options(const DdpOptions& options) {
  LaneOptions lanes{
      .who = "ddp", .lanes = options.lanes, .threads = options.threads, .buffers = options.buffers};
  if (options.hook) lanes.over_ranks = fmt::format("the hook {}", options.hook->name());
  if (options.reduce_dtype && !options.hook) lanes.over_ranks = "reduce_dtype";
  return lanes;
}

void check_lane_options(const LaneOptions& options, const Group& group) {
  if (options.lanes < 0) {
    throw ConfigError(
        fmt::format("[{}] lanes = {}: a number of lanes, or 0", options.who, options.lanes));
  }
  if (options.lanes == 0) return;
  const int64_t others = group.transport().lanes();
  if (others != 0 && others != options.lanes) {
    throw ConfigError(fmt::format(
        "[{}] lanes = {}, but another model of this group has {}: give all the same number",
        options.who, options.lanes, others));
  }
  if (options.lanes < group.size()) {
    throw ConfigError(
        fmt::format("[{}] lanes = {} on {} ranks: each needs one, so run at most as "
                    "many ranks as there are lanes",
                    options.who, options.lanes, group.size()));
  }
  if (options.threads < 1) {
    throw ConfigError(fmt::format("[{}] threads = {}: at least 1", options.who, options.threads));
  }
  if (!options.over_ranks.empty()) {
    throw ConfigError(fmt::format(
        "[{}] lanes = {} together with {}: it averages over ranks, and with lanes the average has "
        "to be the same for every number of ranks; leave out one of them",
        options.who, options.lanes, options.over_ranks));
  }
}

std::string unfit_for_lanes(const Model& model, const LaneOptions& options,
                            const ModuleRef& module) {
  if (options.buffers == Buffers::None && !model.buffers.empty()) {
    return fmt::format(
        "Buffers::None together with lanes: each rank would keep buffer '{}' of its own, and which "
        "lanes a rank runs depends on the number of ranks; use Buffers::Broadcast or Average",
        model.buffers.front().name);
  }
  if (has_sync_batch_norm(module)) {
    return "SyncBatchNorm together with lanes: its statistics are over the ranks' batches of one "
           "forward, and lanes of one rank are not in one; use BatchNorm, GroupNorm or LayerNorm";
  }
  return {};
}

void begin_lanes(const Group& group, const LaneOptions& options) {
  comm::compute_with(options.threads);
  const auto mine = determinism_report(group);
  const auto all = group.all_gather_bytes(fmt::format("lanes\t{}\n{}", options.lanes, packed(mine)),
                                          {.label = "lanes"});
  const auto first = unpacked(all[0]);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    for (const auto& difference : unpacked(all[rank]).differences(first)) {
      const auto text =
          fmt::format("rank {} differs from rank 0 in what bits depend on: {}", rank, difference);
      if (is_decisive(difference)) {
        throw ConfigError(
            fmt::format("[{}] {}; with lanes all ranks have to be the same", options.who, text));
      }
      if (group.rank() == 0) log::warn(fmt::format("[{}] {}", options.who, text));
    }
  }
  if (group.rank() == 0)
    log::info(fmt::format("[{}] {} lanes: {}", options.who, options.lanes, mine.text()));
}

bool is_compiled_anew(const ModuleRef& module) {
  if (!module.script()) return false;
  const auto forward = module.script()->find_method("forward");
  auto* graph = forward ? torch::jit::tryToGraphFunction(forward->function()) : nullptr;
  return graph != nullptr && graph->get_executor().isOptimized();
}

void warn_of_compiled(std::string_view who) {
  log::warn(fmt::format(
      "[{}] TorchScript has compiled forward() of the scripted module anew, which it does after a "
      "process's first calls, and that rounds otherwise: with lanes the bits depend on the number "
      "of ranks now. Call torch::jit::setGraphExecutorOptimize(false) before the first forward(), "
      "or have torch::jit::GraphOptimizerEnabledGuard as_written(false) around each of a lane",
      who));
}

void object_to_missing_lane(Objection& objection, const LanePlan& plan, int64_t own_lane) {
  objection.add(fmt::format(
      "{} of the step has had no backward() outside of hold(): run one in every lane, and after an "
      "exception ddp.zero_grad() or fsdp.zero_grad() before the next step, where that of an "
      "optimizer or module is not enough",
      plan.name(own_lane)));
}

void object_unless_in_lane(Objection& objection, const LanePlan& plan, std::string_view type) {
  if (plan.is_open()) return;
  objection.add(
      fmt::format("backward() outside of a lane, with {}Options::lanes = {}: run it within for "
                  "(auto [x, y] : {}.lanes(step))",
                  type, plan.lanes, type == "Ddp" ? "ddp" : "fsdp"));
}

void object_to_second_backward(Objection& objection, const LanePlan& plan) {
  // One that threw counts: what had arrived of it is in sums already.
  if (!plan.is_open() || !std::exchange(plan.has_pass, true)) return;
  objection.add(fmt::format(
      "a second backward() in {}: add the losses and run one, or run all but the "
      "last under hold(); after one that threw, leave the loop and begin the step again",
      plan.name(plan.open)));
}

void object_to_zero_grad(Objection& objection, const LanePlan& plan) {
  objection.add(
      fmt::format("zero_grad() in {}, where gradients are being added up: call it before the "
                  "loop over the lanes",
                  plan.name(plan.open)));
}

void object_to_other_threads(Objection& objection, std::string_view type, int threads) {
  if (at::get_num_threads() == threads) return;
  objection.add(fmt::format(
      "this rank computes with {} threads now, {}Options::threads are {}: kernels divide their "
      "sums by that number, so leave it as it is",
      at::get_num_threads(), type, threads));
}

void refuse_lanes(const Group& group, std::string_view who, std::string_view advice) {
  if (group.transport().lanes() == 0) return;
  throw ConfigError(fmt::format(
      "[{}] the ranks of this group run {} lanes, and {} over ranks gives other bits on another "
      "number of them: {}",
      who, group.transport().lanes(), who, advice));
}

}  // namespace lockstep::parallel
