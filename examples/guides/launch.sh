#!/bin/sh
# The ways in which guides start a training, here with a file; each line does the same.
set -e
file=${1:?usage: launch.sh FILE [--set KEY=VALUE]...}
shift
lockstep train "$file" --nproc-per-node 2 "$@"                          # starts its ranks itself
lockstep run --nproc_per_node=2 lockstep train "$file" "$@"             # torchrun --nproc_per_node=2
lockstep train "$file" --config_file "$(dirname "$0")/default_config.yaml" "$@"  # accelerate launch --config_file
PET_NPROC_PER_NODE=2 lockstep train "$file" "$@"                        # torchrun's variable
