// Sizes in bytes that estimates count with.
#pragma once

#include <cstdint>

namespace lockstep::plan {

constexpr double kFloat = 4, kNarrow = 2, kIndex = 8;
constexpr double kFirstBucket = 1 << 20;  // Ddp's

constexpr int64_t kMostRanks = 1 << 20;  // that are planned and simulated

}  // namespace lockstep::plan
