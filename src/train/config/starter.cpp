// The file that `lockstep config init` writes.
#include "lockstep/train/config.h"

namespace lockstep::train {

std::string starter_config() {
  return R"(# A run of Lockstep: lockstep train FILE. docs/configuration.md has all keys.
#   lockstep config check FILE     says what is wrong with it
#   lockstep config show FILE      shows every value, and where it came from
# Any value can be given on the command line: --set training.seed=3

model:
  kind: mlp              # linear, mlp, convnet, resnet18, transformer
  hidden: [256]          # widths of the hidden layers
  activation: relu

data:
  kind: fashion-mnist    # mnist, csv, npy, images, tokens, ...
  # path: data/          # other kinds need it

optimizer:
  kind: adam             # sgd, adam, adamw
  learning_rate: 1e-3
  lr_scaling: none       # linear, sqrt: with the number of ranks

schedule:
  kind: constant         # linear, cosine, step, one_cycle, ...
  # warmup_steps: 100

training:
  epochs: 2
  batch_size: 64         # per rank
  # gradient_accumulation_steps: 4
  # max_grad_norm: 1.0
  seed: 1
  metrics: [accuracy]

# mixed_precision: bf16

logging:
  logging_steps: 200     # optimizer steps between two lines
  # output_dir: runs/first   # metrics.jsonl, result.json and checkpoints

# checkpoint:            # needs logging.output_dir, or a directory of its own
#   save_strategy: epoch # no, steps, epoch
#   save_total_limit: 3
#   resume: latest       # from the beginning when there is none

launch:
  nproc_per_node: 1      # ranks on this host; cpu: one per core
)";
}

}  // namespace lockstep::train
