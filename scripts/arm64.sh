#!/usr/bin/env bash
# Compiles the rooms without torch for ARM64 with Debian's cross compiler, and runs their unit tests under qemu's user
# emulation. The libraries they need are unpacked into .deps/arm64, from Debian's archive; as root the compiler and
# qemu are installed, too.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '[arm64] %s\n' "$*" >&2; }
root=$PWD/.deps/arm64
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
  arm_apt install -y --download-only --no-install-recommends libfmt-dev libspdlog-dev libssl-dev libyaml-cpp-dev nlohmann-json3-dev \
    libcli11-dev zlib1g-dev libgtest-dev libgmock-dev >/dev/null
  for archive in "$root"/apt/archives/*.deb; do dpkg -x "$archive" "$root/sys"; done
  touch "$root/unpacked"
fi

cat >build/arm64-toolchain.cmake <<EOF
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CXX_FLAGS_INIT "-isystem $root/sys/usr/include/aarch64-linux-gnu")
set(CMAKE_FIND_ROOT_PATH $root/sys /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L $root/sys)
EOF
cmake -S . -B build/arm64 -G Ninja -DCMAKE_TOOLCHAIN_FILE="$PWD/build/arm64-toolchain.cmake" -DCMAKE_BUILD_TYPE=Release \
  -DLOCKSTEP_TORCH=OFF -DLOCKSTEP_MOLD=OFF >/dev/null
ninja -j "${JOBS:-$(nproc)}" -C build/arm64 test_core test_launch test_engine test_checkpoint_format
for test in core engine checkpoint_format; do
  say "$(qemu-aarch64 -L "$root/sys" -E "LD_LIBRARY_PATH=$PWD/build/arm64/lib" "build/arm64/bin/test_$test" "$@" | tail -3 | tr '\n' ' ')"
done
