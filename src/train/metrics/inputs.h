// What metrics are given, brought into one form.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::train {

// One row per sample; all on the CPU, contiguous.
struct ClassRows {
  at::Tensor outputs;  // float32 or float64, samples x classes
  at::Tensor targets;  // int64, samples
  at::Tensor weights;  // float64, samples; undefined: 1 each
};

// A classifier's outputs as metrics.h describes them; those of two classes in one number become two
// columns, of `threshold` and the number. Throws ConfigError that begins with `who`.
ClassRows class_rows(std::string_view who, const at::Tensor& outputs, const at::Tensor& targets,
                     const at::Tensor& weights, double threshold);

// Weights of `count` samples as float64, on the CPU; undefined stays undefined. Throws ConfigError
// unless they are finite and not negative.
at::Tensor sample_weights(std::string_view who, const at::Tensor& weights, at::IntArrayRef samples);

// What a metric's kind() says of its ignore_index.
std::string ignoring(std::optional<int64_t> ignore_index);

// Calls use(row, target, weight, index) for the samples that count, with pointers to float or
// double rows, or fault(index, text) for one that has a NaN or a target that is not a class.
template <class Use, class Fault>
void each_sample(const ClassRows& rows, std::optional<int64_t> ignored, const Use& use,
                 const Fault& fault);

}  // namespace lockstep::train

#include "train/metrics/inputs.inl"
