// Points of three spiral arms, and which arm each lies on: the tutorial's data set.
#pragma once

#include <torch/torch.h>

#include <cmath>

class Spiral : public torch::data::datasets::Dataset<Spiral> {
 public:
  explicit Spiral(size_t size) : size_(size) {}

  torch::data::Example<> get(size_t index) override {
    const auto arm = static_cast<int64_t>(index % 3);
    const double along = static_cast<double>(index / 3 * 3) / static_cast<double>(size_);
    const double angle = 4 * along + 2.1 * static_cast<double>(arm);
    return {torch::tensor({along * std::cos(angle), along * std::sin(angle)}, torch::kFloat),
            torch::tensor(arm)};
  }

  torch::optional<size_t> size() const override { return size_; }

 private:
  size_t size_;
};
