// What a run says before and after it, and result.json.
#pragma once

#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/train/config.h"
#include "lockstep/train/registry.h"
#include "lockstep/train/trainer.h"

namespace lockstep::train {

// The lines at the start: model, data, ranks, precision, how many samples a step has, memory.
std::vector<std::string> header(const RunConfig& config, const RunData& data,
                                const TrainerOptions& options, const Trainer& trainer,
                                const torch::nn::Module& model, const comm::World& world);

// What is known of a run that has succeeded.
struct Ending {
  Outcome outcome;
  std::vector<double> peak_bytes = {};  // by rank
};

// The lines at the end.
std::vector<std::string> summary(const Ending& ending, const RunConfig& config);

// result.json, of a run that has succeeded, and of one that has failed.
std::string result_json(const Ending& ending, const RunConfig& config, const comm::World& world);
// `error` ends the program with `exit_status`.
std::string result_json(const std::string& error, int exit_status, const RunState& state,
                        const comm::World& world);

// Peak resident memory of this process, in bytes.
double peak_memory();

// The file appears as a whole or not at all. Throws Error.
void write_whole(const std::string& path, const std::string& text);

}  // namespace lockstep::train
