#include "train/run/builtin.h"

#include <fmt/format.h>

#include "lockstep/core/error.h"
#include "lockstep/models/models.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/models/transformer.h"
#include "lockstep/parallel/call.h"

namespace lockstep::train {
namespace {

int64_t or_else(int64_t given, int64_t otherwise) { return given > 0 ? given : otherwise; }

int64_t inputs_of(int64_t given, const SampleShape& shape) {
  if (given > 0 && given != shape.features()) {
    throw ConfigError(
        fmt::format("[model] model.inputs is {}, and a sample has {} numbers: leave it out", given,
                    shape.features()));
  }
  return shape.features();
}

// One output may stand for two classes, and for a number that is regressed.
int64_t outputs_of(int64_t given, const SampleShape& shape) {
  if (given > 1 && given < shape.classes) {
    throw ConfigError(
        fmt::format("[model] model.outputs is {}, and the data have {} classes: as many, or leave "
                    "it out",
                    given, shape.classes));
  }
  return or_else(given, shape.outputs());
}

// Images of channels x height x width.
int64_t channels_of(const SampleShape& shape, const std::string& kind) {
  if (shape.data.size() == 3) return shape.data[0];
  throw ConfigError("[model] " + kind +
                    " takes images of channels x height x width, and the samples have " +
                    std::to_string(shape.data.size()) + " dimensions: use mlp or linear");
}

// With inputs in the dtype of its weights: NumPy saves float64, and images may be bytes, where
// nobody has said otherwise.
template <class Net>
Model of_numbers(Net net) {
  return Model(net.ptr(), [net, weight = net->parameters().front()](const at::Tensor& x) {
    return parallel::call(net, x.is_complex() ? x : x.to(weight.scalar_type()));
  });
}

Model linear(const RunConfig& config, const SampleShape& shape) {
  const auto& given = config.model.linear;
  return of_numbers(
      models::Linear(models::LinearOptions{.inputs = inputs_of(given.inputs, shape),
                                           .outputs = outputs_of(given.outputs, shape),
                                           .bias = given.bias}));
}

Model mlp(const RunConfig& config, const SampleShape& shape) {
  const auto& given = config.model.mlp;
  std::vector<int64_t> sizes = {inputs_of(given.inputs, shape)};
  sizes.insert(sizes.end(), given.hidden.begin(), given.hidden.end());
  sizes.push_back(outputs_of(given.outputs, shape));
  return of_numbers(
      models::Mlp(models::MlpOptions{.sizes = sizes,
                                     .activation = models::activation_named(given.activation),
                                     .dropout = given.dropout}));
}

Model convnet(const RunConfig& config, const SampleShape& shape) {
  const auto& given = config.model.convnet;
  return of_numbers(
      models::ConvNet(models::ConvNetOptions{.in_channels = channels_of(shape, "convnet"),
                                             .classes = outputs_of(given.outputs, shape),
                                             .channels = given.channels,
                                             .dropout = given.dropout,
                                             .batch_norm = given.batch_norm}));
}

Model resnet18(const RunConfig& config, const SampleShape& shape) {
  const auto& given = config.model.resnet18;
  return of_numbers(
      models::ResNet18(models::ResNet18Options{.classes = outputs_of(given.outputs, shape),
                                               .in_channels = channels_of(shape, "resnet18"),
                                               .small_images = given.small_images}));
}

// Tokens of one dimension.
Model transformer(const RunConfig& config, const SampleShape& shape) {
  const auto& given = config.model.transformer;
  if (shape.data.size() != 1) {
    throw ConfigError(fmt::format(
        "[model] transformer takes sequences of tokens, and the samples have {} dimensions",
        shape.data.size()));
  }
  models::Transformer net{nullptr};
  if (!given.pretrained.empty()) {
    net = models::load_transformer(given.pretrained, {.dropout = given.dropout});
  } else {
    const int64_t vocabulary = or_else(given.vocabulary, shape.classes);
    if (vocabulary == 0) {
      throw ConfigError(
          "[model] transformer: nothing says how many tokens there are: give model.vocabulary, or "
          "a folder that `lockstep tokenize` wrote as data.path");
    }
    net = models::Transformer(models::TransformerOptions{.vocabulary = vocabulary,
                                                         .layers = given.layers,
                                                         .hidden = given.hidden,
                                                         .feed_forward = given.feed_forward,
                                                         .heads = given.heads,
                                                         .kv_heads = given.kv_heads,
                                                         .head_dim = given.head_dim,
                                                         .max_length = given.max_length,
                                                         .tied = given.tied,
                                                         .rope_theta = given.rope_theta,
                                                         .norm_eps = given.norm_eps,
                                                         .dropout = given.dropout});
  }
  const auto& has = net->options;
  if (has.vocabulary < shape.classes) {
    throw ConfigError(
        fmt::format("[model] transformer: a vocabulary of {}, and the data have {} "
                    "different tokens: give model.vocabulary of that size or more",
                    has.vocabulary, shape.classes));
  }
  if (has.max_length < shape.data[0]) {
    throw ConfigError(
        fmt::format("[model] transformer: max_length is {}, and samples have {} "
                    "tokens: lower data.sequence_length",
                    has.max_length, shape.data[0]));
  }
  return net;
}

AdamOptions adam_options(const RunConfig& config) {
  const auto& given = config.optimizer;
  return {.lr = given.learning_rate,
          .beta1 = given.beta1,
          .beta2 = given.beta2,
          .eps = given.eps,
          .weight_decay = given.weight_decay};
}

}  // namespace

std::map<std::string, Registry::MakeModel> builtin_models() {
  return {{"linear", linear},
          {"mlp", mlp},
          {"convnet", convnet},
          {"resnet18", resnet18},
          {"transformer", transformer}};
}

std::map<std::string, Registry::ChooseOptimizer> builtin_optimizers() {
  return {{"sgd",
           [](const RunConfig& config) {
             const auto& given = config.optimizer;
             return sgd({.lr = given.learning_rate,
                         .momentum = given.momentum,
                         .weight_decay = given.weight_decay,
                         .nesterov = given.nesterov});
           }},
          {"adam", [](const RunConfig& config) { return adam(adam_options(config)); }},
          {"adamw", [](const RunConfig& config) { return adamw(adam_options(config)); }}};
}

std::map<std::string, Registry::MakeLoss> builtin_losses() {
  return {{"cross_entropy",
           [](const RunConfig& config) {
             return cross_entropy({.label_smoothing = config.training.label_smoothing});
           }},
          {"mse", [](const RunConfig&) { return mse(); }},
          {"l1", [](const RunConfig&) { return l1(); }},
          {"huber", [](const RunConfig&) { return huber(); }},
          {"bce_with_logits", [](const RunConfig&) { return bce_with_logits(); }},
          {"nll", [](const RunConfig&) { return nll(); }}};
}

}  // namespace lockstep::train
