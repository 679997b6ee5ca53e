// Sections `parallel` and `mixed_precision`.
#include "train/config/key.h"

#define AT LOCKSTEP_MEMBER

namespace lockstep::train {
namespace {

void add_fsdp_keys(KeyList& keys) {
  keys.choice("fsdp.sharding_strategy", AT(parallel.fsdp.sharding_strategy),
              {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"},
              "What is sharded over the ranks, HYBRID: over those of a host; as accelerate's (also "
              "1 to 5).");
  keys.add("fsdp.reshard_after_forward", AT(parallel.fsdp.reshard_after_forward),
           "Whether parameters are gathered again in backward.");
  keys.choice("fsdp.auto_wrap_policy", AT(parallel.fsdp.auto_wrap_policy),
              {"AUTO", "NO_WRAP", "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"},
              "How units are found. AUTO: by the two keys below where one is given, otherwise the "
              "blocks of a transformer or ResNet, and of other models none.");
  keys.add("fsdp.min_num_params", AT(parallel.fsdp.min_num_params),
           "Least parameters of a unit, with SIZE_BASED_WRAP; of a transformer, of a block.",
           at_least(0));
  keys.add("fsdp.transformer_layer_cls_to_wrap", AT(parallel.fsdp.transformer_layer_cls_to_wrap),
           "Names of the classes that are units, with TRANSFORMER_BASED_WRAP; a transformer's: "
           "TransformerBlock.");
  keys.choice("fsdp.backward_prefetch", AT(parallel.fsdp.backward_prefetch),
              {"BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"},
              "When the next unit is gathered in backward.");
  keys.add("fsdp.forward_prefetch", AT(parallel.fsdp.forward_prefetch),
           "Whether the next unit is gathered in forward.");
  keys.add(
      "fsdp.cpu_offload", AT(parallel.fsdp.cpu_offload),
      "Whether parameters lie in the host's memory, as those of CPU ranks always do; accelerate's "
      "offload_params.");
  keys.add("fsdp.offload_folder", AT(parallel.fsdp.offload_folder),
           "Where each rank's part of parameters, gradients and optimizer state lies in files "
           "without names, for models larger than memory; empty: in memory.");
  keys.choice("fsdp.state_dict_type", AT(parallel.fsdp.state_dict_type),
              {"SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"},
              "Has no effect: each rank writes its part, and any number of ranks restores it.");
  keys.add("fsdp.use_orig_params", AT(parallel.fsdp.use_orig_params),
           "Has no effect: optimizers see shards under the parameters' names.");
  keys.add("fsdp.sync_module_states", AT(parallel.fsdp.sync_module_states),
           "Has no effect: they become rank 0's at the start in any case.");
  keys.add("fsdp.activation_checkpointing", AT(parallel.fsdp.activation_checkpointing),
           "Whether units are computed again in backward.");
}

}  // namespace

void add_parallel_keys(KeyList& keys) {
  keys.section("parallel");
  keys.choice("strategy", AT(parallel.strategy), {"ddp", "fsdp"},
              "ddp: each rank has the whole model; fsdp: it is sharded.");
  keys.add("lanes", AT(parallel.lanes),
           "The result is the same for any number of ranks up to this one; 0: without.",
           between(0, 4096));
  keys.add("bucket_cap_mb", AT(parallel.bucket_cap_mb),
           "MiB of gradients that are averaged at a time.", between(1e-3, 1e6));
  keys.choice("unused", AT(parallel.unused), {"zero", "error"},
              "Parameters that backward does not reach count as zero, or are an error.");
  keys.choice("buffers", AT(parallel.buffers), {"broadcast", "average"},
              "What becomes of the model's buffers after each step.");
  keys.add("sync_bn", AT(parallel.sync_bn), "BatchNorm over the batches of all ranks.");
  keys.add("sync_bn_group_size", AT(parallel.sync_bn_group_size),
           "BatchNorm over groups of N ranks; 0: all.", at_least(0));
  keys.add("zero", AT(parallel.zero), "The optimizer's state is sharded over the ranks (ZeRO 1).");
  keys.choice("hook", AT(parallel.hook), {"none", "fp16", "bf16", "power_sgd", "top_k"},
              "How gradients are made smaller before they are sent.");
  keys.add("hook_rank", AT(parallel.hook_rank), "power_sgd: of the approximation.", at_least(1));
  keys.add("hook_start_step", AT(parallel.hook_start_step),
           "power_sgd: so many steps at the start are averaged exactly.", at_least(1));
  keys.add("hook_fraction", AT(parallel.hook_fraction),
           "top_k: share of the gradient that is sent.",
           {.least = 0, .most = 1, .above_least = true});
  keys.choice("backend", AT(parallel.backend),
              {"auto", "shm", "tcp", "gloo", "host-then-net", "nccl", "cuda_ipc"},
              "How ranks talk; LOCKSTEP_BACKEND overrides it.");
  keys.choice("device", AT(parallel.device), {"auto", "cpu", "cuda"},
              "What ranks compute on; LOCKSTEP_DEVICE overrides it.");
  keys.add("timeout_seconds", AT(parallel.timeout_seconds),
           "How long a rank waits for the others; LOCKSTEP_TIMEOUT overrides it.",
           between(1, 604800));
  keys.add("tls", AT(parallel.tls),
           "Whether ranks, and launchers, encrypt what they send each other over the network; "
           "LOCKSTEP_TLS overrides it.");
  add_fsdp_keys(keys);

  keys.section("mixed_precision");
  keys.choice("dtype", AT(mixed_precision.dtype), {"no", "bf16", "fp16", "auto"},
              "Of matrix products and convolutions; auto: bf16 where the hardware has it.");
  keys.add("initial_scale", AT(mixed_precision.initial_scale), "fp16: the loss is multiplied by.",
           above(0));
  keys.add("growth_interval", AT(mixed_precision.growth_interval),
           "fp16: steps without infinities after which the scale doubles.", at_least(1));
}

}  // namespace lockstep::train

#undef AT
