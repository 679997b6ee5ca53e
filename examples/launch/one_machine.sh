#!/bin/sh
# One machine: a rank for each GPU, or for each core where there is none. Without --nproc-per-node, one.
#   one_machine.sh PROGRAM ARGS
exec lockstep run --nproc-per-node "${RANKS:-auto}" --max-restarts "${RESTARTS:-0}" "$@"
