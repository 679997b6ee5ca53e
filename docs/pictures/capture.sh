#!/usr/bin/env bash
# What run.svg shows: a training on two ranks, and one whose rank 2 is killed. From the root of the repository, after
# `make build`:
#   script -qec "bash docs/pictures/capture.sh" docs/pictures/run.typescript && python3 docs/pictures/draw.py run
bin=$PWD/build/release/bin
export PATH=$bin:$PATH OMP_NUM_THREADS=1
cd "$bin" || exit
say() { printf '\033[1m$ %s\033[0m\n' "$*"; }

say lockstep run --nproc-per-node 2 mnist
lockstep run --nproc-per-node 2 mnist
echo
say "lockstep run --nproc-per-node 4 mnist --epochs 50 &  sleep 4; kill -9 PID_OF_RANK_2"
lockstep run --nproc-per-node 4 mnist --epochs 50 &
launcher=$!
sleep 4
for rank in $(cat /proc/$launcher/task/*/children); do
  if tr '\0' '\n' 2>/dev/null </proc/"$rank"/environ | grep -qx RANK=2; then kill -9 "$rank"; fi
done
wait $launcher; status=$?
say 'echo $?'
echo $status
