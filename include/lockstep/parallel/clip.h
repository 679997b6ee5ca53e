// What a program does to gradients between backward() and step(): clipping, and a check for NaN.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "lockstep/checkpoint/module_ref.h"
#include "lockstep/comm/group.h"

namespace lockstep::parallel {

// How a norm is taken.
struct ClipOptions {
  // The p of the p-norm, above 0; infinity for the largest magnitude.
  double norm_type = 2.0;
  // Throw Error instead of scaling by a norm that is NaN or infinite.
  bool error_if_nonfinite = false;
  // Set when each rank holds gradients of its own, as shards of the parameters: the norm is then of
  // all ranks' together and the same tensor on all, float64 where some rank's is, else float32: one
  // all_reduce of two float64, which every rank of it calls. Not for Ddp, whose gradients are the
  // same on all ranks, and refused (ConfigError) with lanes.
  std::optional<Group> group = std::nullopt;
};

// Scales all gradients by max_norm / norm when their norm, taken as of one vector, is larger.
// Values are those of Python's torch.nn.utils.clip_grad_norm_, bit for bit without a group where
// all gradients have one dtype (it adds several up in another order). Returns the norm from before,
// as a tensor on the gradients' device: nothing waits for the device unless error_if_nonfinite or a
// group asks to. Undefined gradients are skipped; a parameter that is listed twice counts once.
// Throws ConfigError for a norm_type that is not above 0 or a max_norm that is negative or NaN,
// Error (on all ranks) for a norm that is not finite; then the gradients are as they were. An
// Fsdp's shards are refused without a group of their ranks.
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const ClipOptions& options = {});

// Clamps every element of every gradient to [-max_value, max_value]; a NaN stays one. Throws
// ConfigError for a max_value that is negative or NaN, and for a complex gradient.
void clip_grad_value_(const std::vector<at::Tensor>& parameters, double max_value);

// Throws Error when any rank has a gradient with a NaN or an infinity, on all ranks with the same
// text: each such parameter's name, rank and counts. Every rank of `group` calls it: one all_reduce
// of one element while all is well.
void check_finite(const ModuleRef& module, const Group& group);

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::check_finite;
using parallel::clip_grad_norm_;
using parallel::clip_grad_value_;
using parallel::ClipOptions;
}  // namespace lockstep
