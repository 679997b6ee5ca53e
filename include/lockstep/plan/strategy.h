// Memory and time of one strategy on one number of ranks. Needs no torch.
//
// Memory after Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
// Models", SC 2020, with what this library's Ddp, ZeroOptimizer and Fsdp hold beside it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/plan/cost_model.h"
#include "lockstep/plan/machine.h"
#include "lockstep/plan/model_profile.h"

namespace lockstep::plan {

// How a model is sharded over the ranks.
enum class Strategy {
  Ddp,                  // every rank has all
  Zero,                 // Ddp with ZeroOptimizer: the optimizer's state is sharded (ZeRO 1)
  FsdpGradients,        // Fsdp, Sharding::Gradients: gradients, too (ZeRO 2)
  FsdpFull,             // Fsdp, Sharding::Full: parameters, too (ZeRO 3)
  FsdpHybridGradients,  // ZeRO 2 within a node; nodes replicate each other
  FsdpHybrid,           // ZeRO 3 within a node
};

// Hooks of Ddp that keep residuals (lockstep/parallel/hooks.h).
enum class Feedback { None, PowerSgd, TopK };

// Where Fsdp keeps its shards of parameters, gradients and optimizer state: on the device, or by
// its offloading in the host's memory, which is the same on CPUs, or in files.
enum class Shards { Device, Host, Files };

// "Ddp", "Ddp with ZeroOptimizer", ...
std::string name_of(Strategy strategy);
std::string name_of(Feedback feedback);  // "none", "power_sgd", "top_k"
// What a configuration file says for it: "parallel: {strategy: ddp, zero: true}".
std::string config_of(Strategy strategy);

// How a model is trained.
struct Training {
  int64_t batch = 1;  // samples of a rank and micro-batch
  // Samples of a rank and batch of an evaluation, 0: `batch`; without it there is none.
  std::optional<int64_t> evaluation_batch = std::nullopt;
  int64_t accumulation = 1;  // micro-batches of a step
  int64_t lanes = 0;         // of all ranks together (docs/reproducibility.md); 0: without
  Precision precision = Precision::Float;
  Recomputed recomputed = Recomputed::Nothing;
  // Under Fsdp alone (parallel.fsdp.activation_checkpointing), as files of models other than the
  // transformer have it.
  bool only_fsdp_recomputes = false;
  int64_t state_bytes = 8;    // of the optimizer, for each parameter: Adam 8, momentum 4, SGD 0
  int64_t average_bytes = 0;  // of averaged weights, for each parameter
  double bucket_bytes = 25 << 20;
  int64_t sent_bytes = 4;  // of a gradient's element on its way: a hook makes it 2
  // Its memory is counted, and its time as that of plain averages.
  Feedback feedback = Feedback::None;
  // Memory is counted by it, and time as on the device.
  Shards shards = Shards::Device;
  bool encrypts = false;     // what goes over the network; its time is not counted
  int64_t prefetched = 0;    // batches that the loader makes ahead
  double dataset_bytes = 0;  // of a data set that each rank holds in its host's memory
  // Seconds of a step on one rank, which computes all lanes, when it was measured; 0: estimate.
  double measured_step = 0;
  // Seconds of forward and backward of one micro-batch, with nothing recomputed, when they were
  // measured (lockstep/plan/measure.h); 0: estimate. measured_step overrides it.
  double measured_pass = 0;
};

// Micro-batches of one rank in a step: with lanes those of each of its lanes.
int64_t passes_of(const Training& training, int64_t ranks);
// Samples of all ranks in a step.
double samples_of(const Training& training, int64_t ranks);

// What a run of the configuration computes in on the machine, where mixed_precision.dtype is auto:
// "bf16" or "no"; else the dtype that it names.
std::string dtype_on(const Machine& machine, const train::RunConfig& config);
// What a configuration says of it; auto: nothing narrow (dtype_on()).
Training training_of(const train::RunConfig& config);
// The strategy that a configuration asks for.
Strategy strategy_of(const train::RunConfig& config);

// Peak memory of one rank in bytes, by what it is for. On CPUs of one host what all ranks share is
// counted in equal parts.
struct Memory {
  double parameters = 0;  // with their narrow copies
  double gradients = 0;
  double optimizer = 0;
  double gathered = 0;       // parameters of other ranks, while units are whole
  double communication = 0;  // buckets beside gradients, memory in which gradients are added up
  double activations = 0;    // kept for backward
  double working = 0;        // beside them, while one unit works
  double data = 0;           // batches; on CPUs also a data set that is held in memory
  double tensors = 0;        // all of these
  double margin = 0;         // lost by the allocator
  double reserved = 0;       // driver, libraries, transport
  double total = 0;
  double available = 0;  // of the device, for one rank
  // Whether it has room.
  bool fits() const { return total <= available; }
};

// The peak of one rank, the model being trained on this many.
Memory memory_of(const ModelProfile& model, const Training& training, Strategy strategy,
                 const Machine& machine, int64_t ranks);

// What a step consists of, and its time.
StepWork work_of(const ModelProfile& model, const Training& training, Strategy strategy,
                 const Machine& machine, int64_t ranks);
StepTime time_of(const ModelProfile& model, const Training& training, Strategy strategy,
                 const Machine& machine, int64_t ranks);

}  // namespace lockstep::plan
