// Sizes that estimates count with, and the largest ones.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep::plan {

constexpr double kFloat = 4, kNarrow = 2, kIndex = 8;
constexpr double kFirstBucket = 1 << 20;  // Ddp's

constexpr int64_t kMostRanks = 1 << 20;  // that are planned and simulated

// Of a model. Sums and products of what is below them fit 64 bits.
constexpr int64_t kMostElements = 1'000'000'000'000'000;
constexpr int64_t kMostLayers = 1'000'000;
constexpr int64_t kMostSamples = 1'000'000'000;  // of a batch, and batches of a step

// The product; throws ConfigError when it is more than kMostElements.
int64_t elements_of(const std::vector<int64_t>& sizes);

}  // namespace lockstep::plan
