#include "lockstep/plan/grpo_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "lockstep/core/error.h"
#include "plan/activation_peak.h"
#include "plan/sizes.h"
#include "plan/words.h"

namespace lockstep::plan {
namespace {

GrpoMemory memory_on(const ModelProfile& profile, const train::TransformerConfig& sizes,
                     const Machine& machine, const GrpoOptions& options, int64_t devices,
                     bool divided) {
  const auto all = static_cast<double>(profile.elements());
  const double share = divided ? 1.0 / static_cast<double>(devices) : 1;
  GrpoMemory m{.devices = devices, .divided = divided};
  const bool is_narrow = options.precision == Precision::Narrow;
  const double each = is_narrow ? kNarrow : kFloat;
  m.weights = each * all * share;
  m.gradients = each * all * share;
  if (is_narrow) m.master = kFloat * all * share;
  m.optimizer = 2 * kFloat * all * share;
  if (options.reference == Reference::Resident) m.reference = each * all * share;
  if (options.reference == Reference::Whole) m.reference = each * all;
  m.states = m.weights + m.gradients + m.master + m.optimizer + m.reference;
  const auto prompts = static_cast<double>(options.prompts);
  const double tokens =
      prompts * (static_cast<double>(options.prompt_tokens) +
                 static_cast<double>(options.group_size) * static_cast<double>(options.new_tokens));
  m.cache = tokens * cache_bytes_per_token(sizes) * each / kNarrow;
  const auto peak_of_update = activation_peak(
      profile, options.update_batch, options.recompute ? Recomputed::Blocks : Recomputed::Nothing);
  m.activations = peak_of_update.kept + peak_of_update.working;
  if (divided) {
    m.whole = each * all - m.weights;
    double root = 0, largest = 0;
    for (const auto& unit : profile.units) {
      const auto elements = static_cast<double>(unit.elements());
      if (unit.is_block) largest = std::max(largest, elements);
      if (!unit.is_block) root += elements;
    }
    // Parameters of three units and the root, and gradients of two and the root.
    m.gathered = each * (2 * root + 5 * largest);
  }
  const Device& device = machine.device;
  const auto peak = [&](double tensors) {
    return tensors * (1 + device.allocator_margin) + device.reserved_bytes;
  };
  m.generating = peak(m.states + m.whole + m.cache);
  m.updating = peak(m.states + m.gathered + m.activations);
  m.total = std::max(m.generating, m.updating);
  m.available = device.memory_bytes;
  if (device.shares_memory)
    m.available /= static_cast<double>(std::min(devices, machine.devices_per_node));
  return m;
}

ModelProfile profile_for(const train::TransformerConfig& sizes, const GrpoOptions& options) {
  if (options.prompts < 1 || options.group_size < 1 || options.prompt_tokens < 1 ||
      options.new_tokens < 1 || options.update_batch < 1) {
    throw ConfigError(
        "[plan] --grpo: prompts, texts of a prompt, tokens and the batch are at least 1");
  }
  const int64_t length = options.prompt_tokens + options.new_tokens;
  train::TransformerConfig fitting = sizes;
  if (length > sizes.max_length) {
    throw ConfigError(fmt::format(
        "[plan] --grpo: prompts of {} tokens and {} new ones, and model.max_length is {}: give "
        "--prompt-tokens and --new-tokens that fit",
        options.prompt_tokens, options.new_tokens, sizes.max_length));
  }
  return transformer_profile(fitting, length, options.precision);
}

const char* name_of(Reference reference) {
  if (reference == Reference::None) return "none";
  if (reference == Reference::Whole) return "whole";
  return reference == Reference::Resident ? "resident" : "offloaded";
}

}  // namespace

double cache_bytes_per_token(const train::TransformerConfig& sizes) {
  const int64_t kv_heads = sizes.kv_heads > 0 ? sizes.kv_heads : sizes.heads;
  const int64_t width = sizes.head_dim > 0 ? sizes.head_dim : sizes.hidden / sizes.heads;
  return static_cast<double>(sizes.layers * 2 * kv_heads * width) * kNarrow;
}

std::vector<GrpoMemory> grpo_memory(const train::TransformerConfig& sizes, const Machine& machine,
                                    const GrpoOptions& options, int64_t most_devices) {
  const auto profile = profile_for(sizes, options);
  std::vector<GrpoMemory> all = {memory_on(profile, sizes, machine, options, 1, false)};
  for (int64_t devices = 2; devices <= most_devices; ++devices) {
    all.push_back(memory_on(profile, sizes, machine, options, devices, true));
  }
  return all;
}

std::string grpo_text(const train::TransformerConfig& sizes, const Machine& machine,
                      const GrpoOptions& options, int width) {
  const auto all = grpo_memory(sizes, machine, options);
  const auto profile = profile_for(sizes, options);
  std::string out = wrapped(
      fmt::format(
          "GRPO on a {} ({} parameters) on {}, {} a device: reference {}, {} x {} texts at a "
          "time, prompts of {} tokens, {} new ones, keys and values of {} a token",
          profile.name, count_text(static_cast<double>(profile.elements())), machine.device.name,
          bytes_text(machine.device.memory_bytes), name_of(options.reference), options.prompts,
          options.group_size, options.prompt_tokens, options.new_tokens,
          bytes_text(cache_bytes_per_token(sizes))),
      width);
  std::vector<std::vector<std::string>> rows = {
      {"devices", "total", "fits", "states", "writing: cache", "whole weights",
       "update: activations", "units", "of states: weights", "gradients", "master", "Adam",
       "reference"}};
  const GrpoMemory* first = nullptr;
  for (const auto& m : all) {
    if (m.fits() && first == nullptr) first = &m;
    rows.push_back({m.divided ? fmt::format("{}, Fsdp", m.devices) : "each, Ddp",
                    bytes_text(m.total), m.fits() ? "yes" : "no", bytes_text(m.states),
                    bytes_text(m.cache), bytes_text(m.whole), bytes_text(m.activations),
                    bytes_text(m.gathered), bytes_text(m.weights), bytes_text(m.gradients),
                    bytes_text(m.master), bytes_text(m.optimizer), bytes_text(m.reference)});
  }
  out += "\n" + table_text(rows, width) + "\n";
  if (first == nullptr) {
    out += wrapped(
        fmt::format("It fits none of up to {} such devices{}.", all.back().devices,
                    options.reference == Reference::Resident
                        ? ": try --reference offloaded, fewer texts at a time, or shorter ones"
                        : ": fewer texts at a time, or shorter ones, need less"),
        width);
  } else if (!first->divided && machine.device.shares_memory) {
    out += wrapped(fmt::format("Use Ddp on up to {} of them a host, which share its memory: each "
                               "holds all of it.",
                               std::min(machine.devices_per_node,
                                        static_cast<int64_t>(first->available / first->total))),
                   width);
  } else if (!first->divided) {
    out += wrapped("One device holds all of it: use Ddp on any number of them.", width);
  } else {
    out += wrapped(
        fmt::format("Use Fsdp on {} devices or more: under Ddp each would need {}. While "
                    "texts are written each device has all weights, which takes {}.",
                    first->devices, bytes_text(all.front().total), bytes_text(first->whole)),
        width);
  }
  return out;
}

std::string grpo_json(const train::TransformerConfig& sizes, const Machine& machine,
                      const GrpoOptions& options) {
  using Json = nlohmann::ordered_json;
  Json rows = Json::array();
  for (const auto& m : grpo_memory(sizes, machine, options)) {
    rows.push_back({{"devices", m.devices},
                    {"strategy", m.divided ? "fsdp" : "ddp"},
                    {"weights", m.weights},
                    {"gradients", m.gradients},
                    {"master", m.master},
                    {"optimizer", m.optimizer},
                    {"reference", m.reference},
                    {"states", m.states},
                    {"cache", m.cache},
                    {"whole", m.whole},
                    {"activations", m.activations},
                    {"gathered", m.gathered},
                    {"generating", m.generating},
                    {"updating", m.updating},
                    {"total", m.total},
                    {"available", m.available},
                    {"fits", m.fits()}});
  }
  return Json{{"device", machine.device.name},
              {"reference", name_of(options.reference)},
              {"rows", rows}}
             .dump(2) +
         "\n";
}

}  // namespace lockstep::plan
