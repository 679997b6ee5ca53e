#!/usr/bin/env bash
# Builds against each given version of libtorch (PyPI's wheels), and trains two short epochs on one and on two ranks
# with each.
#   scripts/torch_versions.sh 2.11.0 2.12.0 ...
# Wheels go to .deps/torch/VERSION (0.5 GB each to fetch), builds to build/torch/VERSION; one line a version is printed.
set -uo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { echo "[torch] which versions?" >&2; exit 2; }
mkdir -p .deps/torch build/torch
failed=0

# The two libraries of CUDA that libtorch_cpu.so itself needs, of the version that it was built with.
cuda_beside() {
  local suffix=
  readelf -d "$1/torch/lib/libtorch_cpu.so" | grep -q 'libcudart.so.12' && suffix=-cu12
  local range=; [ -z "$suffix" ] && range='>=13,<14'
  .deps/tools/bin/uv pip install -q --no-deps --python-version 3.11 --python-platform x86_64-manylinux_2_28 --target "$1" \
    "nvidia-cuda-runtime$suffix$range" "nvidia-cuda-cupti$suffix$range"
}
for version; do
  log=build/torch/$version.log
  begin=$SECONDS
  if {
    [ -f ".deps/torch/$version/installed" ] || {
      rm -rf ".deps/torch/$version"
      .deps/tools/bin/uv pip install -q --no-deps --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --target ".deps/torch/$version" "torch==$version" &&
        cuda_beside ".deps/torch/$version" && touch ".deps/torch/$version/installed"
    } && cmake -S . -B "build/torch/$version" -G Ninja -DCMAKE_BUILD_TYPE=Release -DLOCKSTEP_UNITY=ON -DLOCKSTEP_TESTS=OFF \
      -DLOCKSTEP_BENCHMARKS=OFF -DLOCKSTEP_TORCH_DIR="$PWD/.deps/torch/$version" &&
      ninja -j "${JOBS:-$(nproc)}" -C "build/torch/$version" mnist lockstep_tool &&
      OMP_NUM_THREADS=1 "build/torch/$version/bin/mnist" --epochs 1 &&
      OMP_NUM_THREADS=1 "build/torch/$version/bin/lockstep" run --nproc-per-node 2 "build/torch/$version/bin/mnist" --epochs 1
  } >"$log" 2>&1; then
    echo "libtorch $version: builds and trains ($((SECONDS - begin)) s)"
  else
    echo "libtorch $version: FAILS, see $log"
    failed=1
  fi
done
exit $failed
