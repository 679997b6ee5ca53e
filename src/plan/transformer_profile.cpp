// The transformer's memory and arithmetic, counted along src/models/transformer_block.cpp.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <string>

#include "core/nearest.h"
#include "core/words.h"
#include "lockstep/core/error.h"
#include "lockstep/plan/model_profile.h"
#include "plan/sizes.h"

namespace lockstep::plan {
namespace {

constexpr double kLossChunkBytes = 16
                                   << 20;  // of logits at a time: lockstep/models/cross_entropy.h

train::TransformerConfig completed(train::TransformerConfig sizes) {
  if (sizes.layers > kMostLayers) {
    throw ConfigError(
        fmt::format("[plan] model.layers {}: give at most {}", sizes.layers, kMostLayers));
  }
  if (sizes.feed_forward == 0) sizes.feed_forward = elements_of({3, sizes.hidden});
  if (sizes.kv_heads == 0) sizes.kv_heads = sizes.heads;
  if (sizes.head_dim == 0) {
    if (sizes.hidden % sizes.heads != 0) {
      throw ConfigError(
          fmt::format("[plan] model.hidden {} is not a multiple of model.heads {}: give "
                      "model.head_dim",
                      sizes.hidden, sizes.heads));
    }
    sizes.head_dim = sizes.hidden / sizes.heads;
  }
  if (sizes.vocabulary < 1) {
    throw ConfigError("[plan] model.vocabulary is not known: give it by --set model.vocabulary=N");
  }
  return sizes;
}

// RMSNorm of this many numbers in `rows`: its input as float32, the normalised numbers, a scale of
// each row, and its result when it is kept.
double norm_bytes(double numbers, double rows, double width, bool keeps_result) {
  return kFloat * numbers + width * numbers * (keeps_result ? 2 : 1) + kFloat * rows;
}
// Of it what is not kept when it is recomputed: all but the input as it was, and the result.
double cheap_norm_bytes(double numbers, double rows) { return kFloat * (numbers + rows); }

ProfileUnit block_of(const train::TransformerConfig& o, double tokens, double width) {
  const auto hidden = static_cast<double>(o.hidden), inner = static_cast<double>(o.feed_forward);
  const auto heads = static_cast<double>(o.heads), kv_heads = static_cast<double>(o.kv_heads);
  const int64_t query = elements_of({o.hidden, o.heads, o.head_dim});
  const int64_t key = elements_of({o.hidden, o.kv_heads, o.head_dim});
  const int64_t feed = elements_of({o.hidden, o.feed_forward});
  const double queries = static_cast<double>(o.heads * o.head_dim);
  const double keys = static_cast<double>(o.kv_heads * o.head_dim);
  ProfileUnit unit{.is_block = true};
  unit.parameters = {query, key,  key,  query,    o.head_dim, o.head_dim,
                     feed,  feed, feed, o.hidden, o.hidden};
  const double products = hidden * (2 * queries + 2 * keys) + 3 * hidden * inner;
  // Attention is causal: half of all pairs count.
  unit.flops = tokens * (2 * products + 2 * tokens * queries);
  unit.input = tokens * width * hidden;
  const double attention = norm_bytes(hidden, 1, width, true) +  // before it
                           norm_bytes(queries, heads, width, false) +
                           norm_bytes(keys, kv_heads, width, false) +
                           width * (queries + keys) +         // turned by their positions
                           width * keys +                     // values
                           width * queries + kFloat * heads;  // result and its sums
  const double feed_forward = norm_bytes(hidden, 1, width, true) + 4 * width * inner;
  unit.kept = tokens * (attention + feed_forward);
  // Of silu(gate) and its product with up only the product is kept.
  const double norms = 2 * cheap_norm_bytes(hidden, 1) + cheap_norm_bytes(queries, heads) +
                       cheap_norm_bytes(keys, kv_heads);
  unit.cheap = tokens * (norms + width * inner);
  // Backward of silu(gate) * up has three tensors of the inner width at a time, in the place of the
  // product.
  unit.transient = tokens * width * (2 * inner + 2 * hidden);
  return unit;
}

}  // namespace

ModelProfile transformer_profile(const train::TransformerConfig& given, int64_t tokens,
                                 Precision precision) {
  const auto o = completed(given);
  if (tokens > o.max_length) {
    throw ConfigError(
        fmt::format("[plan] samples of {} tokens, and model.max_length is {}: raise it or shorten "
                    "data.sequence_length",
                    tokens, o.max_length));
  }
  const double width = precision == Precision::Narrow ? 2 : kFloat;
  const auto length = static_cast<double>(tokens), hidden = static_cast<double>(o.hidden);
  const double table = kFloat * static_cast<double>(o.vocabulary) * hidden;
  ModelProfile profile{.name = fmt::format("transformer, {} layers of {}", o.layers, o.hidden),
                       .tokens = tokens,
                       .sample_bytes = 2 * kIndex * length,
                       .attends = true};
  // With the cosines and sines of the positions.
  profile.units.push_back({.name = "embedding",
                           .parameters = {elements_of({o.vocabulary, o.hidden})},
                           .fixed_kept = 2 * kFloat * length * static_cast<double>(o.head_dim)});
  const auto block = block_of(o, length, width);
  elements_of({o.layers, block.elements()});  // refuses what their sum has no room for
  for (int64_t i = 0; i < o.layers; ++i) {
    profile.units.push_back(block);
    profile.units.back().name = fmt::format("layers.{}", i);
  }
  // The loss keeps the gradients of its input and of the whole head, which it has computed already
  // in float32, and holds some logits at a time, of 64 tokens at least.
  ProfileUnit head{.name = "head", .parameters = {o.hidden}};
  if (!o.tied) head.parameters.push_back(o.vocabulary * o.hidden);
  head.flops = 2 * length * static_cast<double>(o.vocabulary) * hidden;
  head.kept = length * (norm_bytes(hidden, 1, width, false) + kFloat * hidden);
  head.fixed_kept = table;
  head.transient = length * width * hidden;
  head.fixed_transient = table * width / kFloat;
  head.chunked = kFloat * length * static_cast<double>(o.vocabulary);
  head.piece = std::max(kLossChunkBytes, 64 * kFloat * static_cast<double>(o.vocabulary));
  profile.units.push_back(head);
  for (auto& unit : profile.units) {
    const auto largest = static_cast<double>(*std::ranges::max_element(unit.parameters));
    unit.fixed_transient = std::max(unit.fixed_transient, kFloat * largest);
  }
  return profile;
}

train::TransformerConfig model_named(const std::string& name) {
  struct Known {
    const char* name;
    int64_t layers, hidden, feed_forward, heads, kv_heads;
    bool tied;
  };
  // Sizes of the models' config.json; Qwen Team, "Qwen3 Technical Report", 2025.
  constexpr std::array kKnown = {Known{"qwen3-0.6b", 28, 1024, 3072, 16, 8, true},
                                 Known{"qwen3-1.7b", 28, 2048, 6144, 16, 8, true},
                                 Known{"qwen3-4b", 36, 2560, 9728, 32, 8, true},
                                 Known{"qwen3-8b", 36, 4096, 12288, 32, 8, false},
                                 Known{"qwen3-14b", 40, 5120, 17408, 40, 8, false},
                                 Known{"qwen3-32b", 64, 5120, 25600, 64, 8, false}};
  std::string lower = lower_case(name);
  if (const size_t slash = lower.rfind('/'); slash != lower.npos) lower.erase(0, slash + 1);
  std::vector<std::string> names;
  for (const auto& each : kKnown) {
    names.emplace_back(each.name);
    if (lower != each.name) continue;
    return {.vocabulary = 151936,
            .layers = each.layers,
            .hidden = each.hidden,
            .feed_forward = each.feed_forward,
            .heads = each.heads,
            .kv_heads = each.kv_heads,
            .head_dim = 128,
            .max_length = 40960,
            .tied = each.tied};
  }
  throw ConfigError(fmt::format("[plan] unknown model '{}'{}; known are {}", name,
                                hint_of(lower, names), fmt::join(names, ", ")));
}

}  // namespace lockstep::plan
