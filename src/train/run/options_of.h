// A Trainer's options of a configuration.
#pragma once

#include <optional>

#include "lockstep/comm/world.h"
#include "lockstep/parallel/activation_checkpointing.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/train/config.h"
#include "lockstep/train/registry.h"
#include "lockstep/train/trainer.h"

namespace lockstep::train {

comm::WorldOptions world_options_of(const RunConfig& config);

// Data as the configuration cuts it: max_samples, validation_fraction, validation_path.
RunData data_of(const RunConfig& config, const Registry& registry, const comm::World& world);

SampleShape shape_of(const RunData& data);

// Where checkpoints go; empty: nowhere.
std::string checkpoint_directory(const RunConfig& config);

// What parallel.fsdp says of this model; nothing with strategy ddp. Throws ConfigError, which names
// the key and where it stands, for units that the model does not have.
std::optional<parallel::FsdpOptions> fsdp_of(const RunConfig& config,
                                             const torch::nn::Module& model,
                                             const comm::World& world);

// With parallel.fsdp.activation_checkpointing: while it lives, the units of the Trainer's model are
// computed again in backward.
std::optional<parallel::ActivationCheckpointing> recomputed_units(const RunConfig& config,
                                                                  const Trainer& trainer,
                                                                  const torch::nn::Module& model);

TrainerOptions options_of(const RunConfig& config, const Registry& registry, const RunData& data,
                          const comm::World& world);

}  // namespace lockstep::train
