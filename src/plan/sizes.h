// Sizes in bytes that estimates count with.
#pragma once

namespace lockstep::plan {

constexpr double kFloat = 4, kNarrow = 2, kIndex = 8;
constexpr double kFirstBucket = 1 << 20;  // Ddp's

}  // namespace lockstep::plan
