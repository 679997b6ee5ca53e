#include "lockstep/plan/placement.h"

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/parallel/metrics.h"
#include "text/files.h"

namespace lockstep::plan {
namespace {

bool fits(const rl::RunOptions& options, const comm::World& world) {
  const std::string path = rl::model_folder(options.model) + "/config.json";
  const auto sizes = sizes_of(models::transformer_options(text::read_file(path), path));
  Machine host = this_host();
  host.device.shares_memory = false;  // what follows is this rank's part of it
  host.device.memory_bytes /= world.local_size();
  const auto all = grpo_memory(sizes, host, grpo_options(options, sizes, world.size()), 1);
  return all.front().fits();
}

}  // namespace

train::TransformerConfig sizes_of(const models::TransformerOptions& o) {
  return {.vocabulary = o.vocabulary,
          .layers = o.layers,
          .hidden = o.hidden,
          .feed_forward = o.feed_forward,
          .heads = o.heads,
          .kv_heads = o.kv_heads,
          .head_dim = o.head_dim,
          .max_length = o.max_length,
          .tied = o.tied,
          .rope_theta = o.rope_theta,
          .norm_eps = o.norm_eps,
          .dropout = o.dropout};
}

GrpoOptions grpo_options(const rl::RunOptions& o, const train::TransformerConfig& sizes,
                         int64_t ranks) {
  const int64_t lanes = o.lanes > 0 ? o.lanes : ranks;
  const int64_t episodes = (o.prompts + lanes - 1) / lanes * o.group_size;  // of a lane
  const int64_t length = std::min(o.context, sizes.max_length);
  const int64_t written = std::min(o.max_new_tokens, length - 1);
  const bool refers = o.use_grpo && o.beta > 0;
  return {.reference = refers ? Reference::Resident : Reference::None,
          .prompts = std::min(episodes, rl::RolloutOptions{}.rows),  // that are computed together
          .group_size = 1,
          .prompt_tokens = length - written,
          .new_tokens = written,
          .update_batch = episodes,
          .recompute = false,
          .precision = o.precision == "bf16" ? Precision::Narrow : Precision::Float};
}

std::string placement(const rl::RunOptions& options, const comm::World& world) {
  if (options.model.empty() || world.size() == 1) return "ddp";
  bool fits_here = false;
  try {
    fits_here = world.device().is_cpu() && fits(options, world);
  } catch (const Error&) {
    // Of the model's folder: run_continual() reads it again.
  }
  return parallel::any_rank(!fits_here, world.group()) ? "fsdp" : "ddp";
}

}  // namespace lockstep::plan
