#include "plan/small_models.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>

#include "lockstep/core/error.h"
#include "plan/sizes.h"

namespace lockstep::plan {
namespace {

int64_t outputs_of(int64_t given, const SampleSizes& sample, const char* kind) {
  const int64_t outputs = given > 0 ? given : sample.outputs;
  if (outputs > 0) return outputs;
  throw ConfigError(fmt::format(
      "[plan] {}: the number of classes or target columns is not known: give --outputs", kind));
}

ModelProfile begin(std::string name, const SampleSizes& sample) {
  return {.name = std::move(name),
          .sample_bytes = kFloat * static_cast<double>(elements_of(sample.data)) + kIndex};
}

double width_of(Precision precision) { return precision == Precision::Narrow ? kNarrow : kFloat; }

// A gradient is computed whole before it is put into its bucket; a narrow one beside its float32
// copy. Under Autocast the first layer keeps a narrow copy of the batch.
void finish(ModelProfile& profile, double inputs, Precision precision) {
  const bool is_narrow = precision == Precision::Narrow;
  if (is_narrow) profile.units.front().kept += kNarrow * inputs;
  const double gradient = kFloat + (is_narrow ? kNarrow : 0);
  for (auto& unit : profile.units) {
    if (unit.parameters.empty()) continue;
    const int64_t largest = *std::ranges::max_element(unit.parameters);
    unit.fixed_transient = std::max(unit.fixed_transient, gradient * static_cast<double>(largest));
  }
}

// The loss keeps log-probabilities, in float32.
ProfileUnit loss_of(int64_t outputs) {
  const auto all = static_cast<double>(outputs);
  return {.name = "loss", .kept = kFloat * all, .transient = 2 * kFloat * all};
}

// The gradient of the model's input is not computed.
enum class Place { First, Later };

ProfileUnit linear_unit(std::string name, int64_t in, int64_t out, bool bias, Place place,
                        double width) {
  ProfileUnit unit{.name = std::move(name), .parameters = {elements_of({in, out})}};
  if (bias) unit.parameters.push_back(out);
  unit.flops = 2 * static_cast<double>(in) * static_cast<double>(out);
  unit.transient = width * static_cast<double>(place == Place::First ? out : in + out);
  return unit;
}

// How many tensors of its size an activation leaves for backward: its result, or its input, too.
double kept_by(const std::string& activation) {
  const bool keeps_result = activation == "relu" || activation == "tanh" ||
                            activation == "sigmoid" || activation == "identity";
  return keeps_result ? 1 : 2;
}

struct Image {
  int64_t channels, height, width;
  double elements() const {
    return static_cast<double>(channels) * static_cast<double>(height) * static_cast<double>(width);
  }
};

Image image_of(const SampleSizes& sample, const char* kind) {
  if (sample.data.size() != 3) {
    throw ConfigError(fmt::format("[plan] {} takes images, and a sample is {}: use mlp or linear",
                                  kind, fmt::join(sample.data, "x")));
  }
  return {sample.data[0], sample.data[1], sample.data[2]};
}

// A convolution, normalised. Backward needs its input, which the layer before has kept, and its
// result, which the normalisation needs; `activated`: and the result of the ReLU after it.
enum class Activated { No, Yes };
ProfileUnit convolution(std::string name, const Image& in, const Image& out, int64_t kernel,
                        Activated activated, double width) {
  ProfileUnit unit{.name = std::move(name),
                   .parameters = {elements_of({in.channels, out.channels, kernel, kernel}),
                                  out.channels, out.channels}};
  unit.flops = 2 * static_cast<double>(unit.parameters.front()) * static_cast<double>(out.height) *
               static_cast<double>(out.width);
  unit.kept = width * out.elements() * (activated == Activated::Yes ? 2 : 1);
  unit.transient = width * (in.elements() + 2 * out.elements());
  unit.fixed_kept = 2 * kFloat * static_cast<double>(out.channels);
  // The weight's gradient is computed in a layout of the kernels' own, then copied into the
  // weight's.
  unit.fixed_transient = 2 * width * static_cast<double>(unit.parameters.front());
  return unit;
}

}  // namespace

ModelProfile linear_profile(const train::LinearConfig& model, const SampleSizes& sample,
                            Precision precision) {
  const int64_t in = model.inputs > 0 ? model.inputs : elements_of(sample.data);
  const int64_t out = outputs_of(model.outputs, sample, "linear");
  auto profile = begin(fmt::format("linear, {} to {}", in, out), sample);
  profile.units = {linear_unit("linear", in, out, model.bias, Place::First, width_of(precision)),
                   loss_of(out)};
  finish(profile, static_cast<double>(in), precision);
  return profile;
}

ModelProfile mlp_profile(const train::MlpConfig& model, const SampleSizes& sample,
                         Precision precision) {
  const double width = width_of(precision);
  std::vector<int64_t> sizes = {model.inputs > 0 ? model.inputs : elements_of(sample.data)};
  sizes.insert(sizes.end(), model.hidden.begin(), model.hidden.end());
  sizes.push_back(outputs_of(model.outputs, sample, "mlp"));
  auto profile = begin(fmt::format("mlp, {}", fmt::join(sizes, " - ")), sample);
  for (size_t i = 0; i + 1 < sizes.size(); ++i) {
    profile.units.push_back(linear_unit(fmt::format("layer {}", i), sizes[i], sizes[i + 1], true,
                                        i == 0 ? Place::First : Place::Later, width));
    const bool is_hidden = i + 2 < sizes.size();
    if (is_hidden) {
      // Dropout keeps its mask and hands its own result on, so that one less is needed of an
      // activation that keeps its input.
      const double dropped = model.activation == "identity" ? 2 : 3;
      const double tensors = model.dropout > 0 ? dropped : kept_by(model.activation);
      const auto numbers = static_cast<double>(sizes[i + 1]);
      profile.units.push_back({.name = fmt::format("activation {}", i),
                               .kept = width * tensors * numbers,
                               .transient = 2 * width * numbers});
    }
  }
  profile.units.push_back(loss_of(sizes.back()));
  finish(profile, static_cast<double>(sizes.front()), precision);
  return profile;
}

ModelProfile convnet_profile(const train::ConvnetConfig& model, const SampleSizes& sample,
                             Precision precision) {
  const Image image = image_of(sample, "convnet");
  const double width = width_of(precision);
  Image in = image;
  const int64_t outputs = outputs_of(model.outputs, sample, "convnet");
  auto profile =
      begin(fmt::format("convnet, {} channels", fmt::join(model.channels, ", ")), sample);
  profile.convolves = true;
  for (size_t i = 0; i < model.channels.size(); ++i) {
    const Image out = {model.channels[i], in.height, in.width};
    // Its operators one by one, since backward frees what each has kept before the next one.
    auto unit = convolution(fmt::format("stage {}", i), in, out, 3, Activated::No, width);
    const bool is_last = i + 1 == model.channels.size();
    const Image pooled = {out.channels, out.height / 2, out.width / 2};
    if (pooled.height < 1 || pooled.width < 1) {
      throw ConfigError(fmt::format(
          "[plan] convnet: stage {} of {} halves images of {} x {} to nothing: give fewer "
          "model.channels, or larger images",
          i + 1, model.channels.size(), image.height, image.width));
    }
    const double numbers = out.elements();
    unit.kept = unit.fixed_kept = 0;
    unit.transient = width * ((i == 0 ? 0 : in.elements()) + numbers);
    if (!model.batch_norm) unit.parameters.pop_back();  // a bias instead of scale and shift
    profile.units.push_back(unit);
    if (model.batch_norm) {
      profile.units.push_back({.name = "normalisation",
                               .kept = width * numbers,
                               .transient = 2 * width * numbers,
                               .fixed_kept = 2 * kFloat * static_cast<double>(out.channels)});
      profile.buffer_elements += 2 * out.channels + 1;
    }
    profile.units.push_back(
        {.name = "relu", .kept = width * numbers, .transient = 2 * width * numbers});
    // The places of the largest, and what the next convolution takes; a mean needs nothing.
    profile.units.push_back({.name = "pooling",
                             .kept = (kIndex + (is_last ? 0 : width)) * pooled.elements(),
                             .transient = width * (numbers + pooled.elements())});
    in = pooled;
  }
  auto classifier = linear_unit("classifier", in.channels, outputs, true, Place::Later, width);
  classifier.kept = width * static_cast<double>(in.channels);
  profile.units.push_back(classifier);
  profile.units.push_back(loss_of(outputs));
  finish(profile, image.elements(), precision);
  return profile;
}

ModelProfile resnet18_profile(const train::Resnet18Config& model, const SampleSizes& sample,
                              Precision precision) {
  const Image image = image_of(sample, "resnet18");
  const double width = width_of(precision);
  const int64_t outputs = outputs_of(model.outputs, sample, "resnet18");
  auto profile = begin("resnet18", sample);
  profile.convolves = true;
  const auto include = [&](ProfileUnit& unit, const ProfileUnit& part) {
    profile.buffer_elements += 2 * part.parameters.back() + 1;
    unit.parameters.insert(unit.parameters.end(), part.parameters.begin(), part.parameters.end());
    unit.flops += part.flops;
    unit.kept += part.kept;
    unit.fixed_kept += part.fixed_kept;
    unit.transient = std::max(unit.transient, part.transient);
    unit.fixed_transient = std::max(unit.fixed_transient, part.fixed_transient);
  };
  const auto half = [](int64_t size) { return (size + 1) / 2; };
  Image in = {64, image.height, image.width};
  if (!model.small_images) in = {64, half(image.height), half(image.width)};
  ProfileUnit first{.name = "conv1"};
  include(first,
          convolution("conv1", image, in, model.small_images ? 3 : 7, Activated::Yes, width));
  profile.units.push_back(std::move(first));
  if (!model.small_images) {
    in = {64, half(in.height), half(in.width)};
    profile.units.back().kept += (width + kIndex) * in.elements();
  }
  for (int stage = 0; stage < 4; ++stage) {
    for (int block = 0; block < 2; ++block) {
      const bool shrinks = stage > 0 && block == 0;
      const Image out = shrinks ? Image{2 * in.channels, half(in.height), half(in.width)} : in;
      // A block is one unit: what Fsdp gathers, and what is recomputed.
      ProfileUnit unit{.name = fmt::format("layer{}.{}", stage + 1, block), .is_block = true};
      include(unit, convolution("conv1", in, out, 3, Activated::Yes, width));
      include(unit,
              convolution("conv2", out, out, 3, Activated::Yes, width));  // the ReLU of the sum
      if (shrinks) include(unit, convolution("downsample", in, out, 1, Activated::No, width));
      unit.input = width * out.elements();  // of the block that follows
      profile.units.push_back(std::move(unit));
      in = out;
    }
  }
  auto classifier = linear_unit("fc", in.channels, outputs, true, Place::Later, width);
  classifier.kept = width * static_cast<double>(in.channels);
  profile.units.push_back(classifier);
  profile.units.push_back(loss_of(outputs));
  finish(profile, image.elements(), precision);
  return profile;
}

}  // namespace lockstep::plan
