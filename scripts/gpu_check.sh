#!/usr/bin/env bash
# Builds Lockstep on a machine with a GPU and checks it there, in the order that shows most in the first minutes; docs/gpu.md.
#   scripts/gpu_check.sh [--out DIR] [--build DIR] [--within SECONDS] [--cpu] [--list] [STAGE...]
exec python3 "$(dirname "$0")/gpu_check.py" "$@"
