// Throughput that others have published, by number of GPUs: facts to hold the cost model against.
// docs/plan.md says where each is from.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lockstep/plan/cost_model.h"

namespace lockstep::plan {

struct Series {
  std::string name;
  const char* device;
  const char* network;
  int layers, hidden;
  bool gathers_twice;                     // FULL_SHARD; else SHARD_GRAD_OP, whose parameters stay
  double reduced_bytes;                   // of a gradient's element
  double tokens;                          // of a device and step
  std::map<int, double> tokens_a_second;  // of a device, by number of devices
};

// MosaicML's llm-foundry, scripts/train/benchmarking/README.md: MPT models, bfloat16, FSDP,
// sequences of 2,048 tokens; nodes of 8 H100 with 3,200 Gbit/s, or of 8 A100 with 1,600.
inline const std::vector<Series>& published() {
  constexpr const char* kH = "h100-sxm";
  constexpr const char* kA = "a100-80gb";
  static const std::vector<Series> all = {
      {"H100 1b",
       kH,
       "8x400g",
       24,
       2048,
       false,
       4,
       12 * 2048,
       {{128, 44123}, {256, 42555}, {512, 39837}}},
      {"H100 3b",
       kH,
       "8x400g",
       32,
       2560,
       false,
       4,
       8 * 2048,
       {{128, 23422}, {256, 22772}, {512, 21664}}},
      {"H100 7b",
       kH,
       "8x400g",
       32,
       4096,
       true,
       4,
       6 * 2048,
       {{128, 10475}, {256, 10119}, {512, 9670}}},
      {"H100 13b",
       kH,
       "8x400g",
       40,
       5120,
       true,
       4,
       16 * 2048,
       {{128, 5080}, {256, 4989}, {512, 4952}}},
      {"H100 30b",
       kH,
       "8x400g",
       48,
       7168,
       true,
       4,
       8 * 2048,
       {{128, 2199}, {256, 2148}, {512, 2115}}},
      {"H100 70b",
       kH,
       "8x400g",
       80,
       8192,
       true,
       4,
       8 * 2048,
       {{128, 1058}, {256, 1035}, {512, 1007}}},
      {"A100 125m",
       kA,
       "8x200g",
       12,
       768,
       true,
       2,
       26 * 2048,
       {{16, 130535}, {32, 127122}, {64, 125234}, {128, 123936}}},
      {"A100 350m",
       kA,
       "8x200g",
       24,
       1024,
       true,
       2,
       18 * 2048,
       {{16, 55413}, {32, 53811}, {64, 52689}, {128, 51934}}},
      {"A100 760m",
       kA,
       "8x200g",
       24,
       1536,
       true,
       2,
       12 * 2048,
       {{16, 29607}, {32, 29648}, {64, 29344}, {128, 28940}}},
      {"A100 3b", kA, "8x200g", 32, 2560, true, 2, 6 * 2048, {{32, 9914}, {64, 9736}, {128, 9538}}},
      {"A100 7b",
       kA,
       "8x200g",
       32,
       4096,
       true,
       2,
       18 * 2048,
       {{32, 3725}, {64, 3665}, {128, 3623}}},
      {"A100 13b", kA, "8x200g", 40, 5120, true, 2, 16 * 2048, {{64, 1976}, {128, 1972}}},
      {"H100 13b, small batch",
       kH,
       "8x400g",
       40,
       5120,
       true,
       4,
       2 * 2048,
       {{16, 4767}, {32, 4811}, {64, 4800}}},
  };
  return all;
}

}  // namespace lockstep::plan
