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
        {"join", "sync_batch_norm", {}, "such a model needs equal numbers of batches"},
        {"sync_batch_norm",
         "unused",
         {},
         "refused or late, where some ranks' input has no gradient"},
        {"join", "gathered", {}, "such a model needs equal numbers of batches"},
        {"gathered", "unused", {}, "refused or late, where some ranks' input has no gradient"},
        {"lanes", "gathered", "over ranks gives other bits", {}},
        {"ignore", "gathered", {}, "weights of ranks' own beside samples of all"},
        {"sync_batch_norm", "create_graph", "backward(create_graph = true)", {}},
        {"sync_batch_norm", "penalty", "backward(create_graph = true)", {}},
        {"gathered",
         "penalty",
         {},
         "in one process a rank's gradients lack the other ranks' losses"},
        {"checkpoint", "penalty", {}, "its backward has no derivative"},
        {"recompute", "penalty", {}, "refused, where a recomputed module has a gradient"},
        {"embedding_sparse", "penalty", {}, "libtorch differentiates no sparse gradient"},
        {"recompute", "inputs", {}, "refused, where a recomputed module has a gradient"},
        {"ignore", "param_dtype", {}, "parameters that Fsdp leaves alone keep their dtype"},
        {"lanes", "sync_buffers", {}, "each lane begins with buffers that all lanes have"},
        {"sync_buffers", "join", {}, "ranks without a batch are in no such step"},
        {"embedding_sparse", "zero", "is sparse: give such parameters an", {}},
        {"embedding_sparse", "clip_value", {}, "libtorch clamps no sparse tensor"},
        {"complex", "amsgrad", {}, "libtorch knows no maximum of complex numbers"},
        {"complex", "clip_value", {}, "libtorch clamps no complex tensor"},
        {"linear_float16", "grad_scaler", "a gradient is float16", {}},
        {"optimizer_broadcast", "join", {}, "ranks without a batch do not load"},
        {"optimizer_broadcast", "zero", "state is sharded over the ranks", {}},
        {"check_same", "join", {}, "ranks without a batch are not alike until finish()"},
        {"check_same", "local_sgd", {}, "ranks are not alike on purpose"},
        {"check_same", "ignore", {}, "ranks are not alike on purpose"},
        {"check_same", "buffers", {}, "ranks are not alike on purpose"},
        {"refresh", "join", {}, "ranks without a batch are in no such step"},
        {"freeze_later", "join", {}, "ranks without a batch are in no such step"},
        {"freeze_later", "unused_error", {}, "refused, as a parameter without a gradient"},
        {"refresh", "frozen", {}, "would unfreeze what is to stay frozen"},
        {"refresh", "freeze_later", {}, "would freeze and unfreeze the same"},
        {"load", "join", {}, "ranks without a batch are in no such step"},
        {"reattach", "join", {}, "a Join refers to its Ddps"},
        {"tied", "checkpoint", {}, "refused, where both are used in a backward"},
        {"ignore", "sync_batch_norm", {}, "weights of ranks' own beside statistics of all"},
        {"ignore", "averager", {}, "an Averager takes all parameters"},
        {"ignore", "hook_cast", {}, "ranks are not alike, which is what is compared"},
        {"ignore", "hook_power_sgd", {}, "ranks are not alike, which is what is compared"},
        {"ignore", "hook_top_k", {}, "ranks are not alike, which is what is compared"},
        {"ignore", "zero", {}, "ignored gradients are not alike"},
        {"local_sgd", "zero", {}, "gradients of ranks' own are not alike"},
        {"lanes", "join", "a Ddp with lanes cannot be joined", {}},
        {"lanes", "backward_twice", "a second backward() in lane", {}},
        {"lanes", "sync_batch_norm", "SyncBatchNorm together with lanes", {}},
        {"lanes", "averager", "gives other bits on another", {}},
        {"lanes", "plateau", "give LaneMean::mean()", {}},
        {"lanes", "tensor_hooks", {}, "each rank's hook is its own, and a lane has none"},
        {"lanes", "ignore", {}, "a rank's own gradients are those of the lanes that it runs"},
        {"fsdp", "embedding_sparse", "belongs to a layer with sparse gradients", {}},
        {"fsdp", "zero", "is an Fsdp's part of one", {}},
        {"fsdp", "optimizer_broadcast", "the state of an Fsdp's shards differs", {}},
        {"fsdp", "averager", "is sharded over the ranks and has no memory outside of its", {}},
        {"fsdp", "check_same", "is sharded over the ranks and has no memory outside of its", {}},
        {"fsdp", "join", {}, "Fsdp is not Joinable"},
        {"fsdp", "load", {}, "parameters are written as shards"},
        {"fsdp", "reattach", {}, "its shards are others, and an optimizer's another"},
        {"fsdp", "refresh", {}, "Ddp::refresh(); Fsdp refuses what is unfrozen later"},
        {"fsdp", "move_parameters", {}, "refused by the next forward, with the parameter's name"},
        {"fsdp", "move_gradients", {}, "gradients of parts, of other sizes on each rank"},
        {"move_parameters", "join", {}, "ranks without a batch are in no such step"},
        {"weight_average", "join", {}, "ranks without a batch make no step"},
        {"joint", "backward_twice", {}, "these programs run two backwards of one model"},
        {"recompute", "create_graph", {}, "refused, where a recomputed module has a gradient"},
        {"recompute", "tied", {}, "refused, where both are used in a backward"},
        {"two_forwards", "recompute", {}, "refused, as a second gradient within a backward"},
        {"two_forwards", "checkpoint", {}, "refused, as a second gradient within a backward"},
        {"recompute", "script", {}, "refused, as a buffer that was replaced by another tensor"},
        {"script", "fsdp", {}, "refused, as a buffer that was replaced by another tensor"},
        {"scripted", "fsdp", {}, "its modules cannot be called through lockstep::call()"},
        {"thrown", "join", {}, "ranks without a batch go through all of the pass"},
        {"thrown", "keep_gradients", {}, "gradients that are there at a throw are unspecified"},
        {"thrown", "global_mean", {}, "counts samples of each loss that is made"},
        {"resume", "join", {}, "ranks without a batch are in no such step"},
        {"resume", "local_sgd", {}, "ranks are not alike on purpose"},
        {"resume", "ignore", {}, "ranks are not alike on purpose"},
        {"resume", "buffers", {}, "ranks are not alike on purpose"},
    };
    // Fsdp is in Ddp's place.
    for (const std::string option : {"unused_error", "check_same_every", "hook_all_reduce",
                                     "hook_cast", "hook_power_sgd", "hook_top_k", "local_sgd"}) {
      made.push_back({"fsdp", option, {}, "an option of Ddp"});
    }
    for (const std::string averaging : {"reduce_dtype", "hook_all_reduce", "hook_cast",
                                        "hook_power_sgd", "hook_top_k", "local_sgd"}) {
      made.push_back({"lanes", averaging, "it averages over ranks, and with lanes", {}});
    }
    for (const std::string other : {"fsdp", "zero", "lanes", "join", "grad_scaler", "ignore",
                                    "local_sgd", "gathered", "joint", "global_mean"}) {
      made.push_back({"lbfgs", other, {}, "these programs minimise a loss of one Ddp's model"});
    }
    // A Ddp has one hook.
    const std::vector<std::string> hooks{"hook_all_reduce", "hook_cast", "hook_power_sgd",
                                         "hook_top_k", "local_sgd"};
    for (size_t i = 0; i < hooks.size(); ++i) {
      made.push_back({hooks[i], "reduce_dtype", kTwoAverages, {}});
      for (size_t j = 0; j < i; ++j) made.push_back({hooks[i], hooks[j], {}, "one hook at a time"});
    }
    for (const std::string optimizer : {"sgd", "adam", "amsgrad", "adamw", "rmsprop"}) {
      made.push_back({"embedding_sparse", optimizer, {}, "libtorch's has no sparse step"});
    }
    for (const std::string optimizer : {"fused_sgd", "fused_adam", "fused_adamw"}) {
      made.push_back({"embedding_sparse", optimizer, "has a sparse gradient", {}});
      made.push_back({"complex", optimizer, "is of no floating-point dtype", {}});
    }
    return made;
  }();
  return all;
}

const std::vector<Conflict>& open_defects() {
  static const std::vector<Conflict> all{};
  return all;
}

// A rank without a batch takes part in each backward of the others. What they do once a step, it
// would do once a backward; a sparse gradient is refused there by name; and with two models it
// takes turns, where these programs run two backwards of one.
bool several_backwards_in_a_join(Program program, std::string_view name) {
  program.features.push_back({std::string(name)});
  // Before a penalty an Fsdp is unsharded: ranks have unequally many lanes, and a backward(), which
  // divides parameters again, leaves none for a second one.
  if (program.has("fsdp") && program.has("penalty") &&
      (program.has("lanes") || program.has("backward_twice")))
    return true;
  // In one process only the rank that overflows would find what clipping has left: a NaN.
  if (program.has("ignore") && program.has("grad_scaler") && program.has("clip_value")) return true;
  // Parts of parameters that Fsdp leaves alone come last.
  if (program.has("param_groups") && program.has("fsdp") && program.has("ignore")) return true;
  const auto has_one_of = [&](std::initializer_list<std::string_view> names) {
    return std::ranges::any_of(names, [&](std::string_view each) { return program.has(each); });
  };
  if (program.has("join") && program.has("backward_twice") && program.has("two_models"))
    return true;
  return program.has("join") && has_one_of({"two_backwards", "backward_twice"}) &&
         (program.has_layer("embedding_sparse") ||
          has_one_of({"zero", "global_mean", "grad_scaler", "plateau", "averager", "schedule",
                      "clip_norm", "clip_value", "update_batch_norm"}));
}

bool conflicts_with(const Program& program, std::string_view name) {
  return several_backwards_in_a_join(program, name) || clashes(conflicts(), program, name) ||
         clashes(open_defects(), program, name);
}

std::string refusal_of(const Program& program) {
  for (const auto& conflict : conflicts()) {
    if (conflict.refusal.empty() || program.ranks == 1) continue;
    if (is_part(program, conflict.one) && is_part(program, conflict.other)) return conflict.refusal;
  }
  return {};
}

}  // namespace lockstep::test::training
