#!/usr/bin/env bash
# Unpacks the bundle of scripts/gpu_bundle.sh in a root that has a compiler, CMake, ninja, Python 3.12 and nothing else, without
# a network, builds it there against libtorch 2.11's wheel, and runs the checks on the CPU: what scripts/gpu_check.sh does on a
# machine with a GPU, but for the GPU. As root; fetches Ubuntu 24.04 (0.2 GB) and the wheel (0.6 GB) the first time.
#   scripts/gpu_rehearsal.sh [ARGUMENT OF gpu_check.sh...]
# JOBS says how many compilers run at a time (all cores), ROOT and SITE where the root and the wheel are.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '[gpu-rehearsal] %s\n' "$*" >&2; }
fail() { printf '[gpu-rehearsal] error: %s\n' "$*" >&2; exit 1; }

root=$(realpath -m "${ROOT:-.deps/gpu-root}")
site=$(realpath -m "${SITE:-.deps/torch/2.11.0-cp312}")
[ "$(id -u)" = 0 ] || fail "needs root, to make a root for the build: use sudo"
if [ ! -e "$root/usr/bin/g++" ]; then
  command -v debootstrap >/dev/null || fail "no debootstrap here: apt-get install debootstrap"
  say "Ubuntu 24.04 with a compiler into $root"
  script=/usr/share/debootstrap/scripts/noble
  [ -e "$script" ] || script=/usr/share/debootstrap/scripts/jammy
  keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg
  if [ -e "$keyring" ]; then check=--keyring=$keyring; else check=--no-check-gpg; fi
  debootstrap --variant=minbase --components=main,universe --include=g++,cmake,ninja-build,python3 "$check" \
    noble "$root" http://archive.ubuntu.com/ubuntu "$script" >&2
fi
if [ ! -e "$site/torch/lib/libtorch_cpu.so" ]; then
  say "libtorch 2.11 into $site"
  .deps/tools/bin/uv pip install -q --no-deps --python-version 3.12 --python-platform x86_64-manylinux_2_28 --target "$site" \
    torch==2.11.0 'nvidia-cuda-runtime>=13,<14' 'nvidia-cuda-cupti>=13,<14'
fi
scripts/gpu_bundle.sh build/gpu-bundle.tar.gz
rm -rf "$root/check"
mkdir -p "$root/check" "$root/site"
tar -xzf build/gpu-bundle.tar.gz -C "$root/check"
[ $# -gt 0 ] || set -- build one_rank cuda_ipc
# The mounts and the empty network are this process's own, and end with it.
status=0
unshare --net --mount --pid --fork --kill-child sh -ec '
  mount --bind "$1" "$0/site"
  mount -o remount,bind,ro "$0/site"
  mount -t proc proc "$0/proc"
  mount -t tmpfs tmpfs "$0/dev/shm"
  mount --bind /dev/null "$0/dev/null"
  mount --bind /dev/urandom "$0/dev/urandom"
  ip link set lo up 2>/dev/null || true
  root=$0; shift
  exec chroot "$root" env -i PATH=/usr/bin:/bin HOME=/root PYTHONPATH=/site OMP_NUM_THREADS=1 \
    /check/lockstep-gpu/scripts/gpu_check.sh --cpu --out /check/out "$@"
' "$root" "$site" --jobs "${JOBS:-$(nproc)}" "$@" || status=$?
say "logs and results.json: $root/check/out"
exit $status
