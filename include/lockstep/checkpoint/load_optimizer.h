// The state of Python's optimizers, from files of torch.save.
//
//   load_module(net, "training.pt", {.prefix = "model.", .allow_unexpected = {"*"}});
//   load_optimizer(adamw, "training.pt", {.prefix = "optimizer."});
#pragma once

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {

// Options of load_optimizer().
struct LoadOptimizerOptions {
  // What the names of the state dict begin with: "optimizer." of torch.save({"optimizer":
  // optimizer.state_dict()}).
  std::string prefix = "";
  // Further entries of groups that are left out, by patterns as of the shell: {"lr_scale"}.
  std::vector<std::string> allow_unexpected = {};
};

// Reads what `optimizer.state_dict()` of torch.optim's Adam, AdamW, SGD, RMSprop or Adagrad has
// into libtorch's optimizer of the same class (FusedAdam and its like are of it): options of each
// group, and each parameter's state. As load_state_dict() does it: parameters are those at the same
// place of the same group, since the file does not name them, and one that has no state there has
// none afterwards. A parameter that is tied counts once. Communicates nothing: every rank calls it.
// Options without a counterpart that change no result (foreach, fused, capturable, differentiable,
// names, what schedules keep there) are left out. Throws CheckpointError, and then nothing has
// changed, that lists all that does not fit: other numbers of groups or parameters, sizes or
// dtypes, state or options of another class, state that the options need and the file lacks,
// maximize; ConfigError for another optimizer, or one over parts of parameters (Fsdp, ZeRO), which
// says how those get it. A file that Adam wrote before 2.7 looks as one of AdamW.
void load_optimizer(torch::optim::Optimizer& optimizer, const std::string& path,
                    const LoadOptimizerOptions& options = {});

}  // namespace lockstep::checkpoint

namespace lockstep {
using checkpoint::load_optimizer;
}  // namespace lockstep
