# The commands of every day. `make train` and `make test` need nothing but this folder and a network
# the first time; the rest is for developers.
RANKS ?= 2
SECONDS_EACH ?= 60
MINUTES ?= 10
KILLS ?= 100
RESULTS ?= $(BUILD)/soak.json
BUILD := build/release
RUN := $(BUILD)/bin/lockstep run --nproc-per-node
NINJA := NINJA_STATUS="[build %f/%t] " ninja
# Prints what a command says only when it fails.
quietly = @log=$$(mktemp) && { $(1) >$$log 2>&1 || { cat $$log; rm -f $$log; exit 1; }; rm -f $$log; }

.PHONY: help train test build configured setup bench bench-setup asan tsan fuzz fuzz-tools soak resume lanes random docs format check-format clean

help: ## this list
	@sed -n 's/^\([a-z -]*\):.*## /  make \1 | /p' Makefile | column -t -s '|'

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

build: configured ## everything, optimised, into build/release
	@$(NINJA) -C $(BUILD)

configured: setup
	$(call quietly,cmake --preset release)

bench: bench-setup build ## measures against PyTorch's Python DDP; writes build/bench/results.json
	@python3 benchmarks/run.py $(BUILD)

asan tsan: bench-setup ## runs the tests of the rooms without torch (asan: comm, too) under a sanitizer
	$(call quietly,cmake --preset $@)
	@cmake --build --preset $@
	@ctest --preset $@

# fuzzer(name, sources, libraries): fuzz-NAME builds tests/fuzz/NAME_fuzz.cpp and runs it on what it has found so far.
define fuzzer
fuzz-$(1): fuzz-tools
	@mkdir -p build/fuzz/corpus/$(1)
	clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Iinclude -Isrc -Itests \
	  tests/fuzz/$(1)_fuzz.cpp $(addprefix src/,$(2)) -o build/fuzz/$(1) $(3) -lfmt
	build/fuzz/$(1) -max_total_time=$(SECONDS_EACH) -verbosity=0 -print_final_stats=1 \
	  -artifact_prefix=build/fuzz/ build/fuzz/corpus/$(1)
fuzz: fuzz-$(1)
.PHONY: fuzz-$(1)
endef
PLACE := $(filter-out core/place/node_list.cpp,$(patsubst src/%,%,$(wildcard src/core/place/*.cpp)))
$(eval $(call fuzzer,idx,data/idx.cpp,-lz))
$(eval $(call fuzzer,csv,data/csv_records.cpp data/csv_table.cpp,))
$(eval $(call fuzzer,npy,data/npy_header.cpp,))
$(eval $(call fuzzer,image,$(addprefix data/,decode_image.cpp decode_jpeg.cpp decode_png.cpp),-ljpeg -lpng))
$(eval $(call fuzzer,rendezvous,launch/rendezvous/codec.cpp launch/rendezvous/secure_channel.cpp core/security/tls.cpp core/security/token.cpp core/environment.cpp,-lssl -lcrypto))
$(eval $(call fuzzer,environment,core/environment.cpp core/log.cpp core/address.cpp core/process_stat.cpp core/place/node_list.cpp $(PLACE) launch/options/slurm.cpp \
  launch/rendezvous/rendezvous.cpp launch/output/streams.cpp,-lspdlog))
$(eval $(call fuzzer,accelerate,launch/options/accelerate.cpp,-lyaml-cpp))
$(eval $(call fuzzer,config,$(patsubst src/%,%,$(wildcard src/train/config/*.cpp)) core/environment.cpp,-lyaml-cpp))
$(eval $(call fuzzer,symbols,launch/diagnosis/symbols.cpp,))
$(eval $(call fuzzer,net,comm/net/frame.cpp comm/net/handshake.cpp core/security/tls.cpp core/security/token.cpp core/environment.cpp,-lssl -lcrypto))
$(eval $(call fuzzer,store,comm/store/protocol.cpp core/security/tls.cpp core/security/token.cpp core/environment.cpp,-lssl -lcrypto))
$(eval $(call fuzzer,door,comm/shm/door.cpp core/descriptors.cpp,))
CHECKPOINT := $(addprefix checkpoint/format/,box.cpp checksum.cpp file_system.cpp json.cpp manifest.cpp safetensors.cpp)
$(eval $(call fuzzer,safetensors,$(CHECKPOINT),))
$(eval $(call fuzzer,manifest,$(CHECKPOINT),))
$(eval $(call fuzzer,torch_file,$(CHECKPOINT) $(addprefix checkpoint/format/,gather.cpp pickle.cpp pickle_calls.cpp stored_tensor.cpp \
  torch_file.cpp zip.cpp),-Itests -lz))
$(eval $(call fuzzer,tokenizer,$(patsubst src/%,%,$(wildcard src/text/*.cpp)),-DFMT_HEADER_ONLY))
REPORT := $(filter-out train/report/run_log.cpp train/report/tensorboard.cpp train/report/open_metrics.cpp,$(patsubst src/%,%,$(wildcard src/train/report/*.cpp)))
$(eval $(call fuzzer,run_log,$(REPORT),$(BUILD)/src/report_assets.cpp))
fuzz-tools:
	@scripts/setup.sh --dev
fuzz: ## feeds each parser damaged bytes for $SECONDS_EACH (60); as many at a time as -j says

soak: build ## random faults in training jobs for $MINUTES (10), added to $RESULTS; a table, and status 1 for a hang or leftover
	@python3 tests/system/soak.py $(BUILD) $(MINUTES) --results $(RESULTS)

resume: configured ## trainings killed at random moments, $KILLS (100) times, and resumed, against undisturbed ones; the seed is the time
	@$(NINJA) -C $(BUILD) resume_trainer lockstep_tool
	@python3 tests/system/resume_test.py . $(BUILD) --kills $(KILLS) --steps 200 --seed $$(date +%s)

lanes: configured ## whether a run with lanes leaves one hash on 1 to 8 ranks, for every model, optimizer and transport (half an hour)
	@$(NINJA) -C $(BUILD) test_lanes
	@$(BUILD)/bin/test_lanes --gtest_also_run_disabled_tests --gtest_filter='LaneBars.*:RandomLanes.*'

random: configured ## random programs of collectives, then of training, against one process: $MINUTES (10) of each; the seed is the time
	@$(NINJA) -C $(BUILD) random_group random_training
	@$(BUILD)/bin/random_group --minutes $(MINUTES) --seed $$(date +%s)
	@$(BUILD)/bin/random_training --minutes $(MINUTES) --seed $$(date +%s)

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
