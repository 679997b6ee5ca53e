// What a plan knows of a model: its parameters, what it keeps for backward, and its arithmetic,
// unit by unit. Needs no torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/train/config.h"

namespace lockstep::plan {

// What computation is done in, and so what most activations are kept in.
enum class Precision { Float, Narrow };  // Narrow: bfloat16 or float16

// What is recomputed instead of kept (lockstep/parallel/activation_checkpointing.h): whole
// blocks, or of a transformer's only norms and activation functions.
enum class Recomputed { Nothing, Cheap, Blocks };

// A part of a model, whose parameters Fsdp gathers together. Bytes "of a sample" are multiplied by
// the batch; the others are not.
struct ProfileUnit {
  std::string name;
  std::vector<int64_t> parameters;  // elements of each that is trained, in order of registration
  int64_t frozen = 0;               // elements of those that are not: they have no gradients
  double flops = 0;                 // of a sample's forward
  double kept = 0;                  // bytes of a sample that backward needs
  double input = 0;                 // of it what is kept when the unit is recomputed
  double cheap = 0;                 // of it what norms and activation functions keep
  double transient = 0;             // bytes of a sample, beside what is kept, while it works
  // Bytes of a sample that forward works on in pieces of at most `piece` bytes, two copies at a
  // time.
  double chunked = 0, piece = 0;
  double fixed_kept = 0;       // bytes that backward needs, of any batch
  double fixed_transient = 0;  // bytes while it works, of any batch
  bool is_block = false;       // one of many of the same kind: it can be recomputed, and is a unit
  // false: it is frozen, and so is all that its input is made by: no gradients go through it.
  bool has_backward = true;

  // The elements of its parameters, frozen or not.
  int64_t elements() const { return trained() + frozen; }
  // Those that have gradients and an optimizer's state.
  int64_t trained() const;
  // How often backward computes what forward does: the gradients of inputs, and of the weights
  // that are trained.
  double backward_passes() const;
};

// A whole model.
struct ModelProfile {
  std::string name;                // "transformer, 4 layers of 256"
  std::vector<ProfileUnit> units;  // in the order of forward
  int64_t buffer_elements = 0;
  int64_t tokens = 0;         // of a sample; 0: samples are counted
  double sample_bytes = 0;    // of the batch that the loader makes
  bool narrow_copies = true;  // computing narrow keeps a narrow copy of each weight (Autocast)
  bool convolves = false;     // computes convolutions, whose libraries have memory of their own
  bool attends = false;       // the same of attention

  // The elements of all units' parameters.
  int64_t elements() const;
  // Of those that are trained.
  int64_t trained() const;
  double forward_flops() const;  // of a sample
};

// The sizes of one sample, and how many classes or target columns there are.
struct SampleSizes {
  std::vector<int64_t> data;
  int64_t outputs = 0;
};

// The sizes of the data that the configuration names, as far as it can be told without reading the
// data: mnist and fashion-mnist, images, tokens, synthetic-regression. Throws ConfigError, which
// says what to give, for the others.
SampleSizes sample_sizes(const train::RunConfig& config);

// A built-in model. Counted, not measured; tests hold it against what libtorch allocates. Throws
// ConfigError for a model of the program's own, and for sizes that do not fit.
ModelProfile profile_of(const train::RunConfig& config, const SampleSizes& sample);

// The transformer's, for `tokens` a sample; 0 in a size means what the configuration says of it.
ModelProfile transformer_profile(const train::TransformerConfig& sizes, int64_t tokens,
                                 Precision precision);

// Sizes of published models by name ("qwen3-4b"), in any case. Throws ConfigError with the nearest
// name for others.
train::TransformerConfig model_named(const std::string& name);

}  // namespace lockstep::plan
