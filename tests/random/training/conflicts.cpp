#include <algorithm>

#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

constexpr auto kTwoAverages = "say how gradients are averaged";
// In a pair: with nothing at all.
constexpr auto kAll = "*";
constexpr auto kSilent = "does not communicate in every pass";

bool is_part(const Program& program, std::string_view name) {
  return program.has(name) || program.optimizer.name == name ||
         std::ranges::any_of(program.layers, [&](const Part& part) { return part.name == name; });
}

bool clashes(const std::vector<Conflict>& table, const Program& program, std::string_view name) {
  return std::ranges::any_of(table, [&](const Conflict& conflict) {
    return (conflict.one == name && (conflict.other == kAll || is_part(program, conflict.other))) ||
           (conflict.other == name && is_part(program, conflict.one));
  });
}

}  // namespace

const std::vector<Conflict>& conflicts() {
  static const auto all = [] {
    std::vector<Conflict> made{
        {"join", "local_sgd", kSilent, {}},
        {"unused_error", "unused", {}, "refused, where a block is left out"},
        {"join", "sync_batch_norm", {}, "such a model needs equal numbers of batches"},
        {"sync_batch_norm", "create_graph", {}, "refused, where the rank has others"},
        {"embedding_sparse", "zero", {}, "refused, where the table is used"},
        {"embedding_sparse", "clip_value", {}, "libtorch clamps no sparse tensor"},
        {"complex", "amsgrad", {}, "libtorch knows no maximum of complex numbers"},
        {"complex", "clip_value", {}, "libtorch clamps no complex tensor"},
        {"complex", "grad_scaler", {}, "libtorch unscales no complex tensor"},
        {"linear_float16", "grad_scaler", {}, "refused: float16 gradients"},
        {"tied", "checkpoint", {}, "refused, where both are used in a backward"},
        {"ignore", "zero", {}, "ignored gradients are not alike"},
        {"local_sgd", "zero", {}, "gradients of ranks' own are not alike"},
    };
    // Hooks: one Ddp has one, and each belongs to one Ddp.
    const std::vector<std::string> hooks{"hook_all_reduce", "hook_cast", "hook_power_sgd",
                                         "hook_top_k", "local_sgd"};
    for (size_t i = 0; i < hooks.size(); ++i) {
      made.push_back({hooks[i], "reduce_dtype", kTwoAverages, {}});
      made.push_back({hooks[i], "two_models", {}, "a hook belongs to one Ddp"});
      for (size_t j = 0; j < i; ++j) made.push_back({hooks[i], hooks[j], {}, "one hook at a time"});
    }
    for (const std::string optimizer : {"sgd", "adam", "amsgrad", "adamw", "rmsprop"}) {
      made.push_back({"embedding_sparse", optimizer, {}, "libtorch's has no sparse step"});
    }
    for (const std::string optimizer : {"fused_sgd", "fused_adam", "fused_adamw"}) {
      made.push_back({"embedding_sparse", optimizer, {}, "refused, where the table is used"});
    }
    return made;
  }();
  return all;
}

const std::vector<Conflict>& open_defects() {
  static const std::vector<Conflict> all{
      {"join", "plateau", {}, "no shadow of what communicates beside Ddp"},
      {"join", "grad_scaler", {}, "no shadow of what communicates beside Ddp"},
      {"join", "global_mean", {}, "no shadow of what communicates beside Ddp"},
      {"join", "two_backwards", {}, "a shadow is one pass"},
      {"hook_cast", "grad_scaler", {}, "an overflow stays in the residuals"},
      {"hook_power_sgd", "grad_scaler", {}, "an overflow stays in the residuals"},
      {"hook_top_k", "grad_scaler", {}, "an overflow stays in the residuals"},
      {"hook_top_k", kAll, {}, "elements are chosen per bucket"},
      {"ignore", kAll, {}, "ddp.zero_grad() does not clear them"},
      {"complex", "zero", {}, "gloo gathers no complex numbers"},
      {"join", "clip_norm", {}, "with a ZeroOptimizer, ranks without a batch do not clip"},
      {"join", "clip_value", {}, "with a ZeroOptimizer, ranks without a batch do not clip"},
      {"complex", "fused_sgd", {}, "a raw c10::Error"},
      {"complex", "fused_adam", {}, "a raw c10::Error"},
      {"complex", "fused_adamw", {}, "a raw c10::Error"},
  };
  return all;
}

bool conflicts_with(const Program& program, std::string_view name) {
  return clashes(conflicts(), program, name) || clashes(open_defects(), program, name);
}

std::string refusal_of(const Program& program) {
  for (const auto& conflict : conflicts()) {
    if (conflict.refusal.empty() || program.ranks == 1) continue;
    if (is_part(program, conflict.one) && is_part(program, conflict.other)) return conflict.refusal;
  }
  return {};
}

}  // namespace lockstep::test::training
