#include "lockstep/plan/placement.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/divided_up.h"
#include "lockstep/core/error.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/parallel/metrics.h"
#include "plan/words.h"
#include "text/files.h"

namespace lockstep::plan {
namespace {

// A rank's part of this host.
Machine part_of_host(int64_t ranks) {
  Machine host = this_host();
  host.device.shares_memory = false;
  host.device.memory_bytes /= static_cast<double>(ranks);
  return host;
}

// Of the tiny model, too.
train::TransformerConfig sizes_for(const rl::RunOptions& options) {
  if (options.model.empty()) {
    const rl::WarmUpOptions warm;
    auto sizes = sizes_of(warm.model);
    sizes.vocabulary = warm.vocabulary;
    sizes.max_length = std::max(sizes.max_length, options.context);
    return sizes;
  }
  const std::string path = rl::model_folder(options.model) + "/config.json";
  return sizes_of(models::transformer_options(text::read_file(path), path));
}

// A model that plays users is whole on each rank.
double bytes_of_user(const rl::RunOptions& options, const train::TransformerConfig& sizes) {
  if (options.user != "model") return 0;
  const GrpoOptions short_ones{
      .prompt_tokens = 1,
      .new_tokens = 1,
      .precision = options.precision == "bf16" ? Precision::Narrow : Precision::Float};
  return grpo_memory(sizes, this_host(), short_ones, 1).front().weights;
}

// Where this many ranks share a host.
bool fits(const rl::RunOptions& options, int64_t ranks, int64_t on_this_host) {
  const auto sizes = sizes_for(options);
  const auto all =
      grpo_memory(sizes, part_of_host(on_this_host), grpo_options(options, sizes, ranks), 1);
  return all.front().total + bytes_of_user(options, sizes) <= all.front().available;
}

// What is wrong with learning there at all; nothing when its states have room.
std::string too_large(const rl::RunOptions& options, int64_t ranks, int64_t on_this_host) {
  const auto sizes = sizes_for(options);
  const bool divided = options.parallel == "fsdp" && ranks > 1;
  for (const auto& m :
       grpo_memory(sizes, part_of_host(on_this_host), grpo_options(options, sizes, ranks), ranks)) {
    if (m.divided != divided || m.devices != (divided ? ranks : 1)) continue;
    const double needed = m.states + bytes_of_user(options, sizes);
    if (needed <= m.available) return "";
    return fmt::format(
        "[three_domain] --parallel {}: weights, gradients, optimizer and reference take {} of each "
        "rank, before it has played an episode, and each of {} rank{} on its host has {}: give "
        "{}more hosts, or a smaller model; --force tries it all the same",
        options.parallel, bytes_text(needed), on_this_host, on_this_host == 1 ? "" : "s",
        bytes_text(m.available), divided ? "" : "--parallel fsdp and several ranks, ");
  }
  return "";
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
  const auto of_lane = [&](int64_t tasks, int64_t each) { return divided_up(tasks, lanes) * each; };
  const int64_t episodes = of_lane(o.prompts, o.group_size);
  const int64_t evaluated = of_lane(o.evaluation_tasks(), o.eval_trials);
  const int64_t length = std::min(o.context, sizes.max_length);
  const int64_t written = std::min(o.max_new_tokens, length - 1);
  const auto reference = [&] {
    if (!o.use_grpo || o.beta <= 0) return Reference::None;
    if (o.reference == "offload") return Reference::Offloaded;
    return o.reference == "resident" ? Reference::Whole : Reference::Resident;
  };
  return {.reference = reference(),
          // That are computed together.
          .prompts = std::min(std::max(episodes, evaluated), rl::RolloutOptions{}.rows),
          .group_size = 1,
          .prompt_tokens = length - written,
          .new_tokens = written,
          .update_batch = episodes,
          .recompute = false,
          .precision = o.precision == "bf16" ? Precision::Narrow : Precision::Float};
}

std::string placement(const rl::RunOptions& options, const comm::World& world) {
  if (options.reference == "shard") return "fsdp";
  if (options.model.empty() || world.size() == 1) return "ddp";
  bool fits_here = false;
  try {
    fits_here = world.device().is_cpu() && fits(options, world.size(), world.local_size());
  } catch (const Error&) {
    // Of the model's folder: run_continual() reads it again.
  }
  return parallel::any_rank(!fits_here, world.group()) ? "fsdp" : "ddp";
}

std::string placement_here(const rl::RunOptions& options, int64_t ranks) {
  if (options.reference == "shard") return "fsdp";
  return options.model.empty() || ranks == 1 || fits(options, ranks, ranks) ? "ddp" : "fsdp";
}

void check_memory(const rl::RunOptions& options, const comm::World& world) {
  if (options.model.empty() || !world.device().is_cpu()) return;
  std::string problem;
  try {
    problem = too_large(options, world.size(), world.local_size());
  } catch (const Error&) {
    // Of the model's folder: run_continual() reads it again.
  }
  for (const auto& of_rank : world.group().all_gather_bytes(problem, {.label = "memory"})) {
    if (!of_rank.empty()) throw ConfigError(of_rank);
  }
}

std::string memory_text(const rl::RunOptions& options, int64_t ranks) {
  const auto sizes = sizes_for(options);
  const Machine host = part_of_host(ranks);
  const auto counted = grpo_options(options, sizes, ranks);
  std::vector<std::vector<std::string>> rows = {{"memory of a rank", "total", "weights",
                                                 "gradients", "master", "Adam", "reference",
                                                 "cache", "activations"}};
  for (const auto& m : grpo_memory(sizes, host, counted, ranks)) {
    if (m.devices != (m.divided ? ranks : 1)) continue;
    rows.push_back({m.divided ? "--parallel fsdp" : "--parallel ddp", bytes_text(m.total),
                    bytes_text(m.weights), bytes_text(m.gradients), bytes_text(m.master),
                    bytes_text(m.optimizer), bytes_text(m.reference), bytes_text(m.cache),
                    bytes_text(m.activations)});
  }
  std::string out = table_text(rows, 100);
  if (const double user = bytes_of_user(options, sizes); user > 0) {
    out += fmt::format("the model that plays users takes {} more\n", bytes_text(user));
  }
  return out + fmt::format("{} rank{} on this host {} {}{}\n", ranks, ranks == 1 ? "" : "s",
                           ranks == 1 ? "has" : "have", bytes_text(host.device.memory_bytes),
                           ranks == 1 ? "" : " each");
}

}  // namespace lockstep::plan
