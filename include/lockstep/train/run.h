// A run as a configuration describes it.
//
//   int main(int argc, char** argv) {
//     lockstep::Registry registry;
//     registry.add_model("net", [](const auto& config, const auto& shape) { return Net(...); });
//     return lockstep::train::run_program(argc, argv, registry);
//   }
#pragma once

#include "lockstep/train/config.h"
#include "lockstep/train/registry.h"

namespace lockstep::train {

// Trains as `config` says, on this process's World: prints what it is about to do, how far it is
// and what came out, and writes metrics.jsonl and result.json (docs/trainer.md describes both).
// Every rank calls it, with the same. Returns the status for main() to return: 0, or kRequeueStatus
// when a signal has ended it. Throws what a Trainer throws; result.json then says so.
int run(const RunConfig& config, const Registry& registry = {});

// A program's main(): reads `PROGRAM --config FILE [--set KEY=VALUE]...` (or the file without
// --config), runs it, and makes errors into exit statuses: 2 for a wrong configuration, 1 for what
// else goes wrong. Signals that end such a run with a checkpoint (checkpoint.save_on_preemption)
// have no effect from its end until the process has ended, or calls this again.
int run_program(int argc, char** argv, const Registry& registry = {});

}  // namespace lockstep::train
