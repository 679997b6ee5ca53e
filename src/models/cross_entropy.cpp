#include "lockstep/models/cross_entropy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "lockstep/core/error.h"

namespace lockstep::models {
namespace {

constexpr int64_t kChunkBytes = 16 << 20;

// A power of 2 near 1 / sqrt(rows): a sum over this many rows of values in [-1, 1] times h /
// sqrt(rows) stays within float16, where h is not yet subnormal.
double shrinking(int64_t rows) {
  return std::exp2(-std::floor(std::log2(static_cast<double>(rows)) / 2));
}

struct Chunked : torch::autograd::Function<Chunked> {
  // Of `targets` those that do not count are below 0. Gradients of the sum are kept, in float32 or
  // wider: divided by the number of targets they would underflow in an Autocast's float16, before a
  // loss scale, which comes with backward, could save them.
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& hidden,
                            const at::Tensor& weight, const at::Tensor& targets, double scale,
                            int64_t chunk, bool wants_hidden, bool wants_weight) {
    const auto wide = hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    at::Tensor loss = at::zeros({}, hidden.options().dtype(wide));
    at::Tensor d_hidden, d_weight;
    if (wants_hidden) d_hidden = at::empty(hidden.sizes(), hidden.options().dtype(wide));
    for (int64_t begin = 0; begin < hidden.size(0); begin += chunk) {
      const int64_t end = std::min(begin + chunk, hidden.size(0));
      const at::Tensor h = hidden.slice(0, begin, end);
      const at::Tensor t = targets.slice(0, begin, end);
      const at::Tensor counts = t.ge(0).unsqueeze(1);
      const at::Tensor index = t.clamp_min(0).unsqueeze(1);
      at::Tensor logs = at::linear(h, weight);
      const auto narrow = logs.scalar_type();  // of products
      logs = logs.to(wide);  // by itself, or both would be there during the next step
      logs = at::log_softmax(logs, -1);
      loss -= logs.gather(1, index).masked_fill_(counts.logical_not(), 0).sum();
      if (!wants_hidden && !wants_weight) continue;
      at::Tensor d_logits = logs.exp_();
      d_logits.scatter_add_(1, index, at::full_like(index, -1, d_logits.options()));
      d_logits.mul_(counts);
      const at::Tensor d = d_logits.to(narrow);
      if (wants_hidden) d_hidden.slice(0, begin, end).copy_(at::matmul(d, weight));
      if (wants_weight) {
        const double less = narrow == at::kHalf ? shrinking(end - begin) : 1;
        at::Tensor part = at::matmul(d.t(), less == 1 ? h : h * less).to(wide);
        if (less != 1) part.div_(less);
        d_weight = d_weight.defined() ? d_weight.add_(part) : part;
      }
    }
    if (wants_weight && !d_weight.defined()) {
      d_weight = at::zeros(weight.sizes(), weight.options().dtype(wide));
    }
    context->save_for_backward({d_hidden, d_weight});
    // Of no target the mean is NaN, and gradients are 0.
    context->saved_data["scale"] = std::isfinite(scale) ? scale : 0.0;
    context->saved_data["hidden"] = static_cast<int64_t>(hidden.scalar_type());
    context->saved_data["weight"] = static_cast<int64_t>(weight.scalar_type());
    return loss.mul_(scale);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (at::GradMode::is_enabled()) {
      throw ConfigError(
          "[transformer] cross_entropy has no second derivative: with create_graph compute the "
          "loss "
          "by torch::nn::functional::cross_entropy of the logits");
    }
    const auto saved = context->get_saved_variables();
    const at::Tensor factor = gradients[0] * context->saved_data["scale"].toDouble();
    const auto scaled = [&](const at::Tensor& sum, const char* of) {
      if (!sum.defined()) return at::Tensor();
      return (sum * factor).to(static_cast<at::ScalarType>(context->saved_data[of].toInt()));
    };
    return {scaled(saved[0], "hidden"), scaled(saved[1], "weight"), {}, {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                         const at::Tensor& targets, const CrossEntropyOptions& options) {
  const auto fail = [](const std::string& what) {
    throw ConfigError("[transformer] cross_entropy: " + what);
  };
  if (weight.dim() != 2 || hidden.dim() < 1 || hidden.size(-1) != weight.size(1) ||
      targets.sizes() != hidden.sizes().slice(0, static_cast<size_t>(hidden.dim()) - 1) ||
      targets.scalar_type() != at::kLong || options.chunk < 0) {
    fail(fmt::format("hidden [{}], weight [{}] and targets [{}] (int64) do not fit",
                     fmt::join(hidden.sizes(), ", "), fmt::join(weight.sizes(), ", "),
                     fmt::join(targets.sizes(), ", ")));
  }
  const at::Tensor flat = targets.reshape({-1});
  const at::Tensor counts = flat.ne(options.ignored);
  const int64_t count = counts.sum().item<int64_t>();
  const at::Tensor chosen = flat.masked_fill(counts.logical_not(), -1);
  if (chosen.numel() > 0) {
    const int64_t most = chosen.max().item<int64_t>();
    const int64_t least = flat.masked_fill(counts.logical_not(), 0).min().item<int64_t>();
    if (most >= weight.size(0) || least < 0) {
      fail(fmt::format("the target {} is outside the vocabulary of {}",
                       most >= weight.size(0) ? most : least, weight.size(0)));
    }
  }
  const int64_t chunk =
      options.chunk > 0
          ? options.chunk
          : std::max<int64_t>(64, kChunkBytes / 4 / std::max<int64_t>(1, weight.size(0)));
  const double scale = options.mean ? 1.0 / static_cast<double>(count) : 1.0;
  const bool grad = at::GradMode::is_enabled();
  return Chunked::apply(hidden.reshape({-1, hidden.size(-1)}), weight, chosen, scale, chunk,
                        grad && hidden.requires_grad(), grad && weight.requires_grad());
}

}  // namespace lockstep::models
