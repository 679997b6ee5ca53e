// The memory of reinforcement learning with GRPO (Shao et al., "DeepSeekMath", 2024) on 1 to 8
// devices: the policy in training, a frozen reference, and the keys and values of the texts that
// are being written. Needs no torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/plan/machine.h"
#include "lockstep/plan/model_profile.h"

namespace lockstep::plan {

// Where the reference model's weights are.
enum class Reference {
  None,       // no reference
  Resident,   // on each device; under Fsdp sharded like the policy
  Offloaded,  // in the host's memory
  Whole,      // on each device, also under Fsdp
};

// How texts are written and learnt from.
struct GrpoOptions {
  Reference reference = Reference::Resident;
  int64_t prompts = 1;           // generated at a time on a device
  int64_t group_size = 4;        // texts of a prompt, which share the prompt's keys and values
  int64_t prompt_tokens = 7067;  // the longest prompt of the three domains (telecom)
  int64_t new_tokens = 1024;     // of a text
  int64_t update_batch = 1;      // texts of a micro-batch in the update
  bool recompute = true;         // activations of blocks twice in the update
  // Narrow: bfloat16, with a float32 master copy; Float: all is float32, without one.
  Precision precision = Precision::Narrow;
};

// One device's bytes.
struct GrpoMemory {
  int64_t devices = 1;
  bool divided = false;  // by Fsdp; else Ddp
  double weights = 0;    // in GrpoOptions::precision, as what follows without another dtype
  double gradients = 0;
  double master = 0;     // float32
  double optimizer = 0;  // Adam's two means, float32
  double reference = 0;
  double states = 0;       // all of these
  double cache = 0;        // keys and values, while texts are written
  double whole = 0;        // under Fsdp all weights at once, while texts are written
  double activations = 0;  // in the update, with what a unit works with
  double gathered = 0;     // under Fsdp units that are whole, and gradients on their way
  double generating = 0;   // the peak of either phase, with the device's margin and reserve
  double updating = 0;
  double total = 0;  // the larger of both
  double available = 0;
  // Whether the larger phase has room.
  bool fits() const { return total <= available; }
};

// Bytes of one token's keys and values, bfloat16.
double cache_bytes_per_token(const train::TransformerConfig& sizes);

// Ddp on each number of devices, which is the same for all, then Fsdp on 2 to `most_devices`.
std::vector<GrpoMemory> grpo_memory(const train::TransformerConfig& sizes, const Machine& machine,
                                    const GrpoOptions& options = {}, int64_t most_devices = 8);

// grpo_memory() as a table of at most `width` columns that says what to do, and as JSON.
std::string grpo_text(const train::TransformerConfig& sizes, const Machine& machine,
                      const GrpoOptions& options, int width = 100);
std::string grpo_json(const train::TransformerConfig& sizes, const Machine& machine,
                      const GrpoOptions& options);

}  // namespace lockstep::plan
