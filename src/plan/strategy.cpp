#include "lockstep/plan/strategy.h"

namespace lockstep::plan {

std::string name_of(Strategy strategy) {
  switch (strategy) {
    case Strategy::Ddp:
      return "Ddp";
    case Strategy::Zero:
      return "Ddp with ZeroOptimizer";
    case Strategy::FsdpGradients:
      return "Fsdp, SHARD_GRAD_OP";
    case Strategy::FsdpFull:
      return "Fsdp, FULL_SHARD";
    case Strategy::FsdpHybridGradients:
      return "Fsdp, HYBRID_SHARD_ZERO2";
    case Strategy::FsdpHybrid:
      return "Fsdp, HYBRID_SHARD";
  }
  return "";
}

std::string name_of(Feedback feedback) {
  return feedback == Feedback::PowerSgd ? "power_sgd"
         : feedback == Feedback::TopK   ? "top_k"
                                        : "none";
}

std::string config_of(Strategy strategy) {
  switch (strategy) {
    case Strategy::Ddp:
      return "parallel: {strategy: ddp}";
    case Strategy::Zero:
      return "parallel: {strategy: ddp, zero: true}";
    case Strategy::FsdpGradients:
      return "parallel: {strategy: fsdp, fsdp: {sharding_strategy: SHARD_GRAD_OP}}";
    case Strategy::FsdpFull:
      return "parallel: {strategy: fsdp, fsdp: {sharding_strategy: FULL_SHARD}}";
    case Strategy::FsdpHybridGradients:
      return "parallel: {strategy: fsdp, fsdp: {sharding_strategy: HYBRID_SHARD_ZERO2}}";
    case Strategy::FsdpHybrid:
      return "parallel: {strategy: fsdp, fsdp: {sharding_strategy: HYBRID_SHARD}}";
  }
  return "";
}

std::string dtype_on(const Machine& machine, const train::RunConfig& config) {
  const auto& dtype = config.mixed_precision.dtype;
  return dtype != "auto" ? dtype : machine.device.has_bf16 ? "bf16" : "no";
}

Training training_of(const train::RunConfig& config) {
  Training out;
  out.batch = config.training.batch_size;
  out.accumulation = config.training.gradient_accumulation_steps;
  if (config.training.eval_strategy != "no") {
    out.evaluation_batch = config.training.eval_batch_size;
  }
  out.lanes = config.parallel.lanes;
  const auto& dtype = config.mixed_precision.dtype;
  if (dtype == "bf16" || dtype == "fp16") out.precision = Precision::Narrow;
  const bool is_fsdp = config.parallel.strategy == "fsdp";
  const auto& twice = config.training.activation_checkpointing;
  if (twice == "selective") out.recomputed = Recomputed::Cheap;
  const bool fsdp_recomputes = is_fsdp && config.parallel.fsdp.activation_checkpointing;
  if (twice == "full" || fsdp_recomputes) out.recomputed = Recomputed::Blocks;
  const auto& fsdp = config.parallel.fsdp;
  if (is_fsdp && fsdp.cpu_offload) out.shards = Shards::Host;
  if (is_fsdp && !fsdp.offload_folder.empty()) out.shards = Shards::Files;
  out.only_fsdp_recomputes = fsdp_recomputes || config.model.kind != "transformer";
  if (config.optimizer.kind == "sgd") {
    const bool has_momentum = config.optimizer.momentum > 0 || moves_momentum(config);
    out.state_bytes = has_momentum ? 4 : 0;
  }
  if (config.weight_average.kind != "none") out.average_bytes = 4;
  out.bucket_bytes = config.parallel.bucket_cap_mb * (1 << 20);
  const auto& hook = config.parallel.hook;
  if (hook == "fp16" || hook == "bf16") out.sent_bytes = 2;
  if (hook == "power_sgd") out.feedback = Feedback::PowerSgd;
  if (hook == "top_k") out.feedback = Feedback::TopK;
  out.encrypts = config.parallel.tls;
  out.prefetched = config.data.prefetch;
  // 60,000 images to train with and 10,000 to evaluate with, 28 x 28 bytes each and a label.
  const bool is_mnist = config.data.kind == "mnist" || config.data.kind == "fashion-mnist";
  if (is_mnist) out.dataset_bytes = 70000 * (28 * 28 + 1);
  return out;
}

Strategy strategy_of(const train::RunConfig& config) {
  if (config.parallel.strategy != "fsdp") {
    return config.parallel.zero ? Strategy::Zero : Strategy::Ddp;
  }
  const auto& fsdp = config.parallel.fsdp;
  const auto& sharding = fsdp.sharding_strategy;
  if (sharding == "NO_SHARD") return Strategy::Ddp;
  const bool keeps = sharding == "SHARD_GRAD_OP" || sharding == "HYBRID_SHARD_ZERO2" ||
                     !fsdp.reshard_after_forward;
  if (sharding.starts_with("HYBRID_SHARD")) {
    return keeps ? Strategy::FsdpHybridGradients : Strategy::FsdpHybrid;
  }
  return keeps ? Strategy::FsdpGradients : Strategy::FsdpFull;
}

}  // namespace lockstep::plan
