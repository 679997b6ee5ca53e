# The commands of every day. `make train` and `make test` need only this folder, and a network
# the first time; the others are for developers.
RANKS ?= 2
SECONDS_EACH ?= 60
MINUTES ?= 10
KILLS ?= 100
BUNDLE ?= build/gpu-bundle.tar.gz
STAGES ?=
RESULTS ?= $(BUILD)/soak.json
BUILD := build/release
RUN := $(BUILD)/bin/lockstep run --nproc-per-node
NINJA := NINJA_STATUS="[build %f/%t] " ninja
# Prints what a command says only when it fails.
quietly = @log=$$(mktemp) && { $(1) >$$log 2>&1 || { cat $$log; rm -f $$log; exit 1; }; rm -f $$log; }

# The package, for Python that runs from the build.
PYTHON := PYTHONPATH=$(BUILD)/python OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo .deps/peers/bin/python

.PHONY: release gpu-bundle gpu-check gpu-rehearsal arm64 torch-versions help train test build configured setup bench bench-setup plan-bars asan tsan fuzz fuzz-tools soak resume lanes tau2 torch-suite python-exits python-bench wheel random docs format check-format clean

help: ## prints this list
	@sed -n 's/^\([a-z0-9 -]*\):.*## /  make \1 | /p' Makefile | column -t -s '|'

train: configured ## trains Fashion-MNIST on $RANKS (2) ranks, then on one
	@$(NINJA) -C $(BUILD) mnist lockstep_tool
	@mkdir -p build/train
	@OMP_NUM_THREADS=1 $(RUN) $(RANKS) $(BUILD)/bin/mnist --json build/train/many.json
	@echo "[train] the same on one rank"
	@OMP_NUM_THREADS=1 $(RUN) 1 $(BUILD)/bin/mnist --json build/train/one.json
	@python3 scripts/compare.py build/train/one.json build/train/many.json

test: bench-setup build ## builds and runs every test
	@ctest --preset release

setup: ## installs Debian packages, and libtorch inside .deps
	@scripts/setup.sh

bench-setup: ## installs the Python peers of tests and benchmarks, too
	@scripts/setup.sh --peers

build: configured ## builds everything, optimised, into build/release
	@$(NINJA) -C $(BUILD)

configured: setup
	$(call quietly,cmake --preset release)

bench: bench-setup build ## measures against PyTorch's Python DDP; writes build/bench/results.json
	@python3 benchmarks/run.py $(BUILD)

plan-bars: configured ## compares what `lockstep plan` predicts for 72 configurations with measurements: ten minutes on a quiet machine
	@$(NINJA) -C $(BUILD) lockstep_tool lockstep_bench bench_plan_bars
	@python3 benchmarks/plan_bars.py $(BUILD)

asan tsan: bench-setup ## runs the tests of the parts without torch (asan: comm, too) under a sanitizer
	$(call quietly,cmake --preset $@)
	@cmake --build --preset $@
	@ctest --preset $@

include tests/fuzz/fuzz.mk
fuzz-tools:
	@scripts/setup.sh --dev
fuzz: ## feeds each parser damaged bytes for $SECONDS_EACH (60); as many at a time as -j says

soak: build ## injects random faults into training jobs for $MINUTES (10), adds the results to $RESULTS and prints a table; status 1 for a hang or leftover process
	@python3 tests/system/soak.py $(BUILD) $(MINUTES) --results $(RESULTS)

resume: configured ## kills trainings at random moments, $KILLS (100) times, resumes them, and compares with undisturbed ones; the seed is the time
	@$(NINJA) -C $(BUILD) resume_trainer lockstep_tool
	@python3 tests/system/resume_test.py . $(BUILD) --kills $(KILLS) --steps 200 --seed $$(date +%s)

lanes: configured ## checks that a run with lanes has one hash on 1 to 8 ranks, for every model, optimizer and transport (half an hour)
	@$(NINJA) -C $(BUILD) test_lanes
	@$(BUILD)/bin/test_lanes --gtest_also_run_disabled_tests --gtest_filter='LaneBars.*:RandomLanes.*'

tau2: configured ## plays the solutions of all of tau2-bench's tasks, which must earn reward 1, and 300 episodes that leave no process behind (minutes; installs its environments)
	@scripts/setup.sh --tau2
	@$(NINJA) -C $(BUILD) test_rl_env
	@LOCKSTEP_TAU2_PYTHON=.deps/tau2/bin/python $(BUILD)/bin/test_rl_env --gtest_also_run_disabled_tests --gtest_filter='*Tau2Real*'

random: configured ## compares random programs of collectives, then of training and of changes to it, with one process, and random runs that are interrupted with undisturbed ones: $MINUTES (10) of each; the seed is the time
	@$(NINJA) -C $(BUILD) random_group random_training random_changes random_runs
	@$(BUILD)/bin/random_group --minutes $(MINUTES) --seed $$(date +%s)
	@$(BUILD)/bin/random_training --minutes $(MINUTES) --seed $$(date +%s)
	@$(BUILD)/bin/random_changes --minutes $(MINUTES) --seed $$(date +%s)
	@$(BUILD)/bin/random_runs --minutes $(MINUTES) --seed $$(date +%s)

torch-suite: bench-setup build ## runs PyTorch's distributed_test.py over Lockstep on 2, 3 and 4 ranks
	@python3 tests/python/run_torch_suite.py $(BUILD) 2 3 4

python-exits: bench-setup build ## starts and ends Python interpreters 1,000 times, in every way
	@$(PYTHON) tests/python/exits.py 1000

python-bench: bench-setup build ## measures Python's calls over Lockstep and over Gloo, by turns
	@$(PYTHON) tests/python/compare_gloo.py

wheel: bench-setup build ## builds the wheel into build/wheel
	@python3 packaging/python/build_wheel.py $(BUILD) build/wheel

torch-versions: setup ## builds against each libtorch of PyPI in $TORCHES, and trains with it: 0.5 GB and a whole build each
	@scripts/torch_versions.sh $(TORCHES)

gpu-bundle: ## all that a machine with a GPU and no network needs to build and check Lockstep, as build/gpu-bundle.tar.gz
	@scripts/gpu_bundle.sh $(BUNDLE)

gpu-check: ## builds and checks Lockstep on this machine's GPU: $STAGES (all), see docs/gpu.md
	@scripts/gpu_check.sh $(STAGES)

gpu-rehearsal: ## unpacks the bundle in a root with a compiler and nothing else, without a network, and builds it there; as root, half an hour
	@scripts/gpu_rehearsal.sh

arm64: ## compiles the rooms without torch for ARM64, and runs their unit tests under qemu; as root the first time
	@scripts/arm64.sh

release: build ## makes the packages, sources, checksums and page of a release in build/release/release
	@python3 scripts/release.py $(BUILD) $(BUILD)/release

docs: ## writes the API reference into build/docs/api/html, and checks it and the spelling of all pages
	@scripts/setup.sh --dev
	@python3 docs/api/make.py .
	@python3 scripts/spelling.py

format: ## formats the sources with clang-format
	@scripts/setup.sh --dev
	@git ls-files '*.h' '*.cpp' '*.inl' | xargs clang-format -i

check-format: ## fails for sources that `make format` would change
	@scripts/setup.sh --dev
	@git ls-files '*.h' '*.cpp' '*.inl' | xargs clang-format --dry-run -Werror

clean: ## removes what was built; .deps and the caches stay
	@rm -rf build
