#!/usr/bin/env bash
# Compiles Lockstep for ARM64 with Debian's cross compiler, runs unit tests under qemu's user emulation, and trains on
# one and on two ranks there. The libraries they need are unpacked into .deps/arm64: Debian's, and the libtorch of that
# architecture. As root the compiler and qemu are installed, too.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '[arm64] %s\n' "$*" >&2; }
root=$PWD/.deps/arm64 build=$PWD/build/arm64
needs=()
for package in crossbuild-essential-arm64 qemu-user; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || needs+=("$package")
done
if [ ${#needs[@]} -gt 0 ]; then
  [ "$(id -u)" = 0 ] || { say "ask an administrator to install: ${needs[*]}"; exit 1; }
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${needs[@]}" >/dev/null
fi

# What a system of that architecture would install, from an empty one, without the C library that the compiler brings.
if [ ! -f "$root/unpacked" ]; then
  say "libraries into .deps/arm64"
  rm -rf "$root"
  mkdir -p "$root/apt/lists/partial" "$root/apt/archives/partial" "$root/sys"
  : >"$root/apt/status"
  arm_apt() {
    apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State::status="$root/apt/status" \
      -o Dir::State::Lists="$root/apt/lists" -o Dir::Cache="$root/apt" -o Dir::Cache::archives="$root/apt/archives" \
      -o APT::Sandbox::User= -o Debug::NoLocking=1 "$@"
  }
  arm_apt update
  # shellcheck disable=SC2046
  arm_apt install -y --download-only --no-install-recommends $(grep -E '^(lib|nlohmann|zlib)' deps/apt.txt) >/dev/null
  for archive in "$root"/apt/archives/*.deb; do dpkg -x "$archive" "$root/sys"; done
  .deps/tools/bin/uv pip install -q --no-deps --require-hashes --python-version 3.11 \
    --python-platform aarch64-manylinux_2_28 --target "$root/libtorch" -r deps/libtorch.txt
  touch "$root/unpacked"
fi

mkdir -p "$build"
cat >"$build/toolchain.cmake" <<END
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CXX_FLAGS_INIT "-isystem $root/sys/usr/include/aarch64-linux-gnu")
set(CMAKE_FIND_ROOT_PATH $root/sys $root/libtorch /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
END
cmake -S . -B "$build" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$build/toolchain.cmake" -DCMAKE_BUILD_TYPE=Release \
  -DLOCKSTEP_UNITY=ON -DLOCKSTEP_MOLD=OFF -DLOCKSTEP_TORCH_DIR="$root/libtorch" >/dev/null
tests=(core engine checkpoint_format train_config comm parallel)
ninja -j "${JOBS:-$(nproc)}" -C "$build" lockstep_tool mnist "${tests[@]/#/test_}"

libraries=$build/lib:$root/libtorch/torch/lib
libraries+=:$(find "$root/libtorch/nvidia" -name 'lib*.so*' -printf '%h\n' | sort -u | paste -sd :)
arm() { OMP_NUM_THREADS=1 qemu-aarch64 -L "$root/sys" -E "LD_LIBRARY_PATH=$libraries" "$@"; }
for test in "${tests[@]}"; do
  say "$test: $(arm "$build/bin/test_$test" "--gtest_filter=${FILTER:-*}" | tail -3 | tr '\n' ' ')"
done
arm "$build/bin/mnist" --epochs 1
