#!/bin/sh
# Two machines: the same command on both. FIRST is the name or address of one of them, whose launcher leads; TOKEN_FILE
# holds a secret that both have:
#   openssl rand -hex 32 > job.token; chmod 600 job.token; scp job.token other:
#   FIRST=node1 TOKEN_FILE=job.token two_machines.sh PROGRAM ARGS
# Add tls=1 to --rdzv-conf when others share the network.
LOCKSTEP_TOKEN_FILE=${TOKEN_FILE:-job.token} exec lockstep run --nnodes 2 --nproc-per-node "${RANKS:-auto}" \
  --rdzv-endpoint "${FIRST:?the first machine}:29400" --rdzv-conf heartbeat_timeout=10 \
  --max-restarts "${RESTARTS:-0}" "$@"
