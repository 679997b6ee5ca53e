#include "models/checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include "lockstep/core/error.h"

namespace lockstep::models {

void check_positive(std::string_view model, std::string_view what, int64_t value) {
  if (value >= 1) return;
  throw ConfigError(fmt::format("[{}] {} = {}: needs to be at least 1", model, what, value));
}

void check_dropout(std::string_view model, double probability) {
  if (probability >= 0 && probability < 1) return;
  throw ConfigError(
      fmt::format("[{}] dropout = {}: a probability from 0 to below 1", model, probability));
}

at::Tensor flat_samples(std::string_view model, const at::Tensor& input, int64_t features) {
  int64_t elements = 1;
  for (int64_t d = 1; d < input.dim(); ++d) elements *= input.size(d);
  if (input.dim() < 1 || elements != features || (input.dim() == 1 && features != 1)) {
    throw ConfigError(fmt::format("[{}] input [{}]: needs n x {}, a sample in each row", model,
                                  fmt::join(input.sizes(), ", "), features));
  }
  return input.dim() == 2 ? input : input.reshape({input.size(0), features});
}

void check_images(std::string_view model, const at::Tensor& images, int64_t channels,
                  int64_t least) {
  if (images.dim() == 4 && images.size(1) == channels && images.size(2) >= least &&
      images.size(3) >= least) {
    return;
  }
  throw ConfigError(fmt::format(
      "[{}] input [{}]: needs images n x {} x height x width of at least {} x {}{}", model,
      fmt::join(images.sizes(), ", "), channels, least, least,
      images.dim() == 2 ? "; these are rows of numbers: let the data set keep its images (Mnist "
                          "with .flatten = false)"
                        : ""));
}

}  // namespace lockstep::models
