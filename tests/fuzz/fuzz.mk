# The fuzzers: fuzz-NAME builds tests/fuzz/NAME_fuzz.cpp with the sources that it tries, and runs it on what it has
# found so far.
FUZZ := clang++ -std=c++20 -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all

# What several fuzzers try is compiled once.
build/fuzz/%.o: %.cpp | fuzz-tools
	@mkdir -p $(@D)
	$(FUZZ) -fsanitize=fuzzer-no-link -MMD -MP -Iinclude -Isrc -Itests -c $< -o $@
-include $(wildcard build/fuzz/*/*/*.d build/fuzz/*/*/*/*.d build/fuzz/*/*/*/*/*.d)

# Every fuzzer links what it needs of the lowest room, and of the libraries that this room uses.
build/fuzz/core.a: $(patsubst %.cpp,build/fuzz/%.o,$(filter-out src/core/version.cpp,$(shell find src/core -name '*.cpp')))
	@rm -f $@
	ar rcs $@ $^

# fuzzer(name, sources of the other rooms, libraries)
define fuzzer
build/fuzz/$(1): build/fuzz/tests/fuzz/$(1)_fuzz.o $(patsubst %.cpp,build/fuzz/src/%.o,$(2)) build/fuzz/core.a
	$(FUZZ) -fsanitize=fuzzer $$^ -o $$@ -lfmt -lssl -lcrypto $(3)
fuzz-$(1): build/fuzz/$(1)
	@mkdir -p build/fuzz/corpus/$(1)
	build/fuzz/$(1) -max_total_time=$(SECONDS_EACH) -verbosity=0 -print_final_stats=1 \
	  -artifact_prefix=build/fuzz/ build/fuzz/corpus/$(1)
fuzz: fuzz-$(1)
.PHONY: fuzz-$(1)
endef
$(eval $(call fuzzer,idx,data/idx/idx.cpp,-lz))
$(eval $(call fuzzer,csv,data/csv/csv_records.cpp data/csv/csv_table.cpp,))
$(eval $(call fuzzer,npy,data/npy/npy_header.cpp,))
$(eval $(call fuzzer,image,$(addprefix data/image/,decode_image.cpp decode_jpeg.cpp decode_png.cpp),-ljpeg -lpng))
$(eval $(call fuzzer,rendezvous,launch/rendezvous/network/codec.cpp launch/rendezvous/network/secure_channel.cpp,))
$(eval $(call fuzzer,environment,launch/options/slurm.cpp launch/rendezvous/host.cpp \
  launch/rendezvous/rendezvous.cpp launch/output/streams.cpp,))
$(eval $(call fuzzer,accelerate,launch/options/accelerate.cpp,-lyaml-cpp))
$(eval $(call fuzzer,config,$(patsubst src/%,%,$(wildcard src/train/config/*.cpp)),-lyaml-cpp))
$(eval $(call fuzzer,symbols,launch/diagnosis/symbols.cpp,))
$(eval $(call fuzzer,net,comm/net/frame.cpp comm/net/handshake.cpp,))
$(eval $(call fuzzer,store,comm/store/protocol.cpp,))
$(eval $(call fuzzer,door,comm/shm/door.cpp,))
CHECKPOINT := $(addprefix checkpoint/format/,box.cpp checksum.cpp file_system.cpp json.cpp directory/manifest.cpp tensor_files/safetensors.cpp)
$(eval $(call fuzzer,safetensors,$(CHECKPOINT),))
$(eval $(call fuzzer,manifest,$(CHECKPOINT),))
$(eval $(call fuzzer,torch_file,$(CHECKPOINT) $(addprefix checkpoint/format/tensor_files/,gather.cpp stored_tensor.cpp) \
  $(addprefix checkpoint/format/torch_save/,pickle.cpp pickle_calls.cpp torch_file.cpp zip.cpp),-lz))
$(eval $(call fuzzer,tokenizer,$(patsubst src/%,%,$(wildcard src/text/*.cpp)),))
$(eval $(call fuzzer,tool_call,$(patsubst src/%,%,$(wildcard src/rl/chat/*.cpp) src/rl/environment/names.cpp),-DFMT_HEADER_ONLY))
REPORT := $(filter-out train/report/log/run_log.cpp train/report/log/record_queue.cpp train/report/exporters/%,$(patsubst src/%,%,$(wildcard src/train/report/*.cpp \
  src/train/report/*/*.cpp)))
# CMake has written the page's style and script into a source.
$(eval $(call fuzzer,run_log,$(REPORT),-Isrc $(BUILD)/src/report_assets.cpp))
