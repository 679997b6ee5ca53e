#include "lockstep/parallel/sync_batch_norm.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/init.h>

#include "lockstep/core/error.h"
#include "parallel/nn/batch_norm_override.h"
#include "parallel/nn/held_group.h"

namespace lockstep::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Of one channel over all ranks' batches; mean and variance as float32, or float64 for such input.
struct Statistics {
  at::Tensor mean, variance;  // biased
  at::Tensor count;           // values a channel: a scalar of float64 where the others are
};

bool is_narrow(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

at::TensorOptions statistics_options(const at::Tensor& input) {
  return input.options().dtype(is_narrow(input.scalar_type()) ? at::kFloat : input.scalar_type());
}

// The kernels take float32 parameters for a narrow input.
std::optional<at::Tensor> as_statistics(const std::optional<at::Tensor>& tensor,
                                        const at::Tensor& input) {
  if (!tensor) return tensor;
  return tensor->to(statistics_options(input).dtype());
}

// Shaped to broadcast over a batch.
at::Tensor by_channel(const at::Tensor& values, const at::Tensor& batch) {
  std::vector<int64_t> shape(batch.dim(), 1);
  shape[1] = values.numel();
  return values.view(shape);
}

// Of all ranks, from a row for each: count, means, and sums of squared deviations from the mean.
// Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
// Variances", 1979: a mean far from zero costs no digits of the variance. Rank by rank, so that all
// ranks get the same bits.
Statistics combined_on_cpu(const at::Tensor& rows, const at::TensorOptions& options) {
  const int64_t channels = (rows.size(1) - 1) / 2;
  std::vector<double> mean(static_cast<size_t>(channels)), squares(mean.size());
  double count = 0;
  for (int64_t rank = 0; rank < rows.size(0); ++rank) {
    const double* row = rows[rank].const_data_ptr<double>();
    const double more = row[0];
    if (more == 0) continue;
    const double part = more / (count + more);
    for (size_t i = 0; i < mean.size(); ++i) {
      const double step = row[1 + i] - mean[i];
      mean[i] += step * part;
      squares[i] += row[1 + mean.size() + i] + step * step * part * count;
    }
    count += more;
  }
  for (double& sum : squares) sum /= count;
  const auto tensor = [&](const std::vector<double>& values) {
    return at::tensor(values, at::kDouble).to(options.dtype().toScalarType());
  };
  return {.mean = tensor(mean),
          .variance = tensor(squares),
          .count = at::scalar_tensor(count, at::kDouble)};
}

// The same for all ranks at once, where they are: the host does not wait for the device.
Statistics combined(const at::Tensor& rows, const at::TensorOptions& options) {
  if (rows.is_cpu()) return combined_on_cpu(rows, options);
  const int64_t channels = (rows.size(1) - 1) / 2;
  const at::Tensor counts = rows.narrow(1, 0, 1), means = rows.narrow(1, 1, channels);
  const at::Tensor count = counts.sum();
  const at::Tensor mean = (means * (counts / count)).sum(0);
  const at::Tensor squares =
      (rows.narrow(1, 1 + channels, channels) + counts * (means - mean).square()).sum(0);
  const auto dtype = options.dtype().toScalarType();
  return {.mean = mean.to(dtype), .variance = (squares / count).to(dtype), .count = count};
}

// Values a channel of this rank's.
int64_t count_of(const at::Tensor& input) {
  return input.numel() == 0 ? 0 : input.numel() / input.size(1);
}

Statistics statistics(const at::Tensor& input, const Group& group) {
  const int64_t channels = input.size(1);
  const auto options = statistics_options(input);
  const at::Tensor mine = at::zeros({1 + 2 * channels}, options.dtype(at::kDouble));
  if (input.numel() > 0) {
    const at::Tensor unused = at::zeros({channels}, options);
    const auto [mean, variance] = at::batch_norm_update_stats(input, unused, unused, 0.0);
    const auto count = static_cast<double>(count_of(input));
    mine[0] = count;
    mine.narrow(0, 1, channels).copy_(mean);
    mine.narrow(0, 1 + channels, channels).copy_(variance).mul_(count);
  }
  const at::Tensor rows = at::empty({group.size(), mine.numel()}, mine.options());
  group.all_gather(rows, mine, {.label = "SyncBatchNorm forward"}).wait();
  return combined(rows, options);
}

struct Normalize : torch::autograd::Function<Normalize> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const Statistics& statistics,
                            double eps, const Group& group) {
    ctx->save_for_backward({input, weight.value_or(at::Tensor()), statistics.mean,
                            statistics.variance, statistics.count});
    ctx->saved_data["eps"] = eps;
    hold_group(*ctx, group);
    if (input.numel() == 0) return at::empty_like(input);
    return std::get<0>(at::native_batch_norm(
        input, as_statistics(weight, input), as_statistics(bias, input), statistics.mean,
        statistics.variance, /*training=*/false, /*momentum=*/0.0, eps));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& outputs) {
    if (at::GradMode::is_enabled()) {
      throw ConfigError(
          "[sync_batch_norm] backward(create_graph = true): its gradient cannot be differentiated "
          "again; use eval() or BatchNorm for second derivatives");
    }
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &variance = saved[3];
    const at::Tensor& slope = outputs[0];
    const double eps = ctx->saved_data["eps"].toDouble();
    const int64_t channels = input.size(1);
    const at::Tensor inverse = (variance + eps).rsqrt();

    // Over this rank's batch: sums of slope * (input - mean) * inverse, and of slope.
    at::Tensor products = at::zeros_like(mean), slopes = at::zeros_like(mean);
    if (input.numel() > 0) {
      at::Tensor unused;
      // CPUs take mean and variance. GPUs want what a forward pass has kept, too, and a weight, of
      // which only the device and dtype matter: any tensor of that many channels.
      std::tie(unused, products, slopes) =
          at::native_batch_norm_backward(slope, input, /*weight=*/inverse, mean, variance, mean,
                                         inverse, /*train=*/false, eps, {false, true, true});
    }
    variable_list gradients(6);
    if (weight.defined()) {
      gradients[1] = products.to(weight.scalar_type());
      gradients[2] = slopes.to(weight.scalar_type());
    }
    if (!ctx->needs_input_grad(0)) return gradients;

    at::Tensor sums = at::cat({products, slopes}).to(at::kDouble);
    held_group(*ctx).all_reduce(sums, ReduceOp::Sum, {.label = "SyncBatchNorm backward"}).wait();
    sums = (sums / saved[4]).to(mean.scalar_type());
    const at::Tensor scale = weight.defined() ? inverse * weight.to(mean.scalar_type()) : inverse;
    // scale * (slope - mean slope - normalised * mean product)
    at::Tensor gradient = input.to(mean.scalar_type()) - by_channel(mean, input);
    gradient.mul_(by_channel(-scale * inverse * sums.narrow(0, 0, channels), input));
    gradient.addcmul_(slope.to(mean.scalar_type()), by_channel(scale, input));
    gradient.sub_(by_channel(scale * sums.narrow(0, channels, channels), input));
    gradients[0] = gradient.to(input.scalar_type());
    return gradients;
  }
};

// New value = (1 - factor) * old + factor * statistic, in the buffer's dtype.
void average_into(const at::Tensor& running, const at::Tensor& statistic, double factor) {
  running.mul_(1 - factor).add_(statistic.to(running.scalar_type()), factor);
}

void check_input(const at::Tensor& input, size_t dimensions, int64_t channels) {
  const auto given = static_cast<size_t>(input.dim());
  const bool fits = given == dimensions + 2 || (dimensions == 1 && given == 2);
  if (fits && input.size(1) == channels) return;
  throw ConfigError(fmt::format(
      "[sync_batch_norm] an input of sizes [{}] for SyncBatchNorm{}d of {} channels: it takes "
      "[batch, {}{}]",
      fmt::join(input.sizes(), ", "), dimensions, channels, channels,
      dimensions == 1   ? " (, length)"
      : dimensions == 2 ? ", height, width"
                        : ", depth, height, width"));
}

}  // namespace

at::Tensor synchronous_batch_norm(const at::Tensor& input, const at::Tensor& weight,
                                  const at::Tensor& bias, const at::Tensor& running_mean,
                                  const at::Tensor& running_var, double factor, double eps,
                                  const Group& group) {
  const Statistics all = [&] {
    const at::NoGradGuard no_grad;
    return statistics(input.detach(), group);
  }();
  // A rank that has two has no need to ask its device how many there are.
  const bool may_lack = count_of(input) < 2;
  const double known = may_lack ? all.count.item<double>() : 2;
  if (known == 1) {
    throw ConfigError(fmt::format(
        "[sync_batch_norm] the batches of all {} ranks hold one value a channel together, which "
        "has no variance: train on more",
        group.size()));
  }
  if (running_mean.defined() && known > 0) {
    const at::NoGradGuard no_grad;
    average_into(running_mean, all.mean, factor);
    average_into(running_var, all.variance * (all.count / (all.count - 1)), factor);
  }
  // Without affine there is nothing to differentiate by.
  const auto parameter = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  return Normalize::apply(input, parameter(weight), parameter(bias), all, eps, group);
}

template <size_t D>
SyncBatchNormImpl<D>::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options_,
                                        const Group& group)
    : options(options_), group_(group) {
  group.refuse_python_ranks("SyncBatchNorm");
  SyncBatchNormImpl::reset();
}

template <size_t D>
SyncBatchNormImpl<D>::SyncBatchNormImpl(const TorchBatchNormImpl<D>& layer, const Group& group)
    : options(layer.options), group_(group) {
  const auto parameter = [&](const char* name, const at::Tensor& tensor) {
    return this->register_parameter(name, tensor, tensor.defined() && tensor.requires_grad());
  };
  weight = parameter("weight", layer.weight);
  bias = parameter("bias", layer.bias);
  running_mean = this->register_buffer("running_mean", layer.running_mean);
  running_var = this->register_buffer("running_var", layer.running_var);
  num_batches_tracked = this->register_buffer("num_batches_tracked", layer.num_batches_tracked);
  this->train(layer.is_training());
}

template <size_t D>
void SyncBatchNormImpl<D>::reset() {
  const std::vector<int64_t> shape{options.num_features()};
  const bool affine = options.affine(), tracked = options.track_running_stats();
  weight = this->register_parameter("weight", affine ? torch::ones(shape) : at::Tensor(), affine);
  bias = this->register_parameter("bias", affine ? torch::zeros(shape) : at::Tensor(), affine);
  running_mean =
      this->register_buffer("running_mean", tracked ? torch::zeros(shape) : at::Tensor());
  running_var = this->register_buffer("running_var", tracked ? torch::ones(shape) : at::Tensor());
  num_batches_tracked = this->register_buffer("num_batches_tracked",
                                              tracked ? torch::tensor(0, at::kLong) : at::Tensor());
}

template <size_t D>
at::Tensor SyncBatchNormImpl<D>::forward(const at::Tensor& input) {
  check_input(input, D, options.num_features());
  const bool training = this->is_training();
  double factor = options.momentum().value_or(0.0);
  if (training && num_batches_tracked.defined()) {
    num_batches_tracked += 1;
    if (!options.momentum()) factor = 1.0 / num_batches_tracked.template item<double>();
  }
  if (!training || group_.size() == 1) {
    if (training && input.numel() == input.size(1)) {
      throw ConfigError("[sync_batch_norm] one value a channel has no variance: train on more");
    }
    return at::batch_norm(input, weight, bias, running_mean, running_var,
                          training || !running_mean.defined(), factor, options.eps(),
                          at::globalContext().userEnabledCuDNN());
  }
  if (const auto gate = gate_.lock()) gate->begin_forward();
  return synchronous_batch_norm(input, weight, bias, running_mean, running_var, factor,
                                options.eps(), group_);
}

template <size_t D>
void SyncBatchNormImpl<D>::pretty_print(std::ostream& stream) const {
  stream << fmt::format(
      "lockstep::SyncBatchNorm{}d({}, eps={}, momentum={}, affine={}, "
      "track_running_stats={}, ranks={})",
      D, options.num_features(), options.eps(),
      options.momentum() ? fmt::format("{}", *options.momentum()) : "None", options.affine(),
      options.track_running_stats(), group_.size());
}

template class SyncBatchNormImpl<1>;
template class SyncBatchNormImpl<2>;
template class SyncBatchNormImpl<3>;

}  // namespace lockstep::parallel
