// Section `model`.
#include "train/config/key.h"

#define AT LOCKSTEP_MEMBER

namespace lockstep::train {
namespace {

constexpr const char* kInputs = "Numbers of a sample; 0: as the data have.";
constexpr const char* kOutputs = "Classes or target columns; 0: as the data have.";
constexpr const char* kClasses = "Classes; 0: as the data have.";

}  // namespace

void add_model_keys(KeyList& keys) {
  keys.section("model");
  keys.choice("kind", AT(model.kind), {"linear", "mlp", "convnet", "resnet18", "transformer"},
              "The model.");
  keys.kinds({"linear"});
  keys.add("inputs", AT(model.linear.inputs), kInputs, at_least(0));
  keys.add("outputs", AT(model.linear.outputs), kOutputs, at_least(0));
  keys.add("bias", AT(model.linear.bias), "Whether a constant is added.");

  keys.kinds({"mlp"});
  keys.add("inputs", AT(model.mlp.inputs), kInputs, at_least(0));
  keys.add("outputs", AT(model.mlp.outputs), kOutputs, at_least(0));
  keys.add("hidden", AT(model.mlp.hidden), "Widths of the hidden layers, in order.", at_least(1));
  keys.choice("activation", AT(model.mlp.activation),
              {"relu", "leaky_relu", "elu", "gelu", "silu", "tanh", "sigmoid", "identity"},
              "Between each two layers.");
  keys.add("dropout", AT(model.mlp.dropout), "Share that is dropped after each activation.",
           between(0, 0.99));

  keys.kinds({"convnet"});
  keys.add("outputs", AT(model.convnet.outputs), kClasses, at_least(0));
  keys.add("channels", AT(model.convnet.channels),
           "Channels of each block of convolution, normalisation, ReLU and pooling.", at_least(1));
  keys.add("dropout", AT(model.convnet.dropout), "Share that is dropped before the linear layer.",
           between(0, 0.99));
  keys.add("batch_norm", AT(model.convnet.batch_norm), "Whether blocks have a BatchNorm.");

  keys.kinds({"resnet18"});
  keys.add("outputs", AT(model.resnet18.outputs), kClasses, at_least(0));
  keys.add("small_images", AT(model.resnet18.small_images),
           "The first layer for images as CIFAR's (3 x 3, no pooling) instead of ImageNet's.");

  keys.kinds({"transformer"});
  keys.add("pretrained", AT(model.transformer.pretrained),
           "A folder in Hugging Face's format, which then gives the sizes.");
  keys.add("vocabulary", AT(model.transformer.vocabulary),
           "Tokens that there are; 0: as the data have.", at_least(0));
  keys.add("layers", AT(model.transformer.layers), "Blocks.", at_least(1));
  keys.add("hidden", AT(model.transformer.hidden), "Width.", at_least(1));
  keys.add("feed_forward", AT(model.transformer.feed_forward),
           "Width within the feed-forward layers; 0: 3 x `hidden`.", at_least(0));
  keys.add("heads", AT(model.transformer.heads), "Heads of queries.", at_least(1));
  keys.add("kv_heads", AT(model.transformer.kv_heads),
           "Heads of keys and values; 0: as many as `heads`.", at_least(0));
  keys.add("head_dim", AT(model.transformer.head_dim), "Width of a head; 0: `hidden` / `heads`.",
           at_least(0));
  keys.add("max_length", AT(model.transformer.max_length), "Tokens of the longest sequence.",
           at_least(1));
  keys.add("tied", AT(model.transformer.tied),
           "Whether the output layer has the weights of the embedding.");
  keys.add("rope_theta", AT(model.transformer.rope_theta), "Of the rotary positions.", above(0));
  keys.add("norm_eps", AT(model.transformer.norm_eps), "Of RMSNorm.", above(0));
  keys.add("dropout", AT(model.transformer.dropout), "Share that is dropped.", between(0, 0.99));
}

void add_data_keys(KeyList& keys) {
  keys.section("data");
  keys.choice("kind", AT(data.kind),
              {"fashion-mnist", "mnist", "idx", "csv", "npy", "safetensors", "images", "tokens",
               "synthetic-regression"},
              "The data set.");
  keys.kinds({"fashion-mnist", "mnist", "idx", "csv", "npy", "safetensors", "images", "tokens"});
  keys.add("path", AT(data.path),
           "File or folder, from the working directory; fashion-mnist: Debian's when empty.");
  keys.add("validation_path", AT(data.validation_path),
           "Data for evaluation, of the same kind; mnist, fashion-mnist: the folder of the test "
           "images, `path` when empty.");
  keys.kinds({"npy", "idx"});
  keys.add("targets_path", AT(data.targets_path), "The file of targets or labels.");
  keys.add("validation_targets_path", AT(data.validation_targets_path),
           "The file of targets or labels for evaluation.");
  keys.kinds({});
  keys.add("validation_fraction", AT(data.validation_fraction),
           "The last share of the samples, of images of each class, is for evaluation; 0: none, or "
           "`validation_path`.",
           between(0, 0.99));
  keys.add("max_samples", AT(data.max_samples),
           "Train on the first N samples, of images on the first N of each class; 0: on all.",
           at_least(0));
  keys.add("shuffle", AT(data.shuffle), "Another order in each epoch.");
  keys.add("drop_last", AT(data.drop_last), "Leave out the batch at the end that is not full.");
  keys.add("workers", AT(data.workers), "Threads that make batches; 0: the training's own.",
           between(0, 1024));
  keys.add("prefetch", AT(data.prefetch), "Batches that are made ahead.", between(0, 65536));
  keys.kinds({"safetensors"});
  keys.add("inputs_key", AT(data.inputs_key), "The name of the tensor of inputs.");
  keys.add("targets_key", AT(data.targets_key), "The name of the tensor of targets.");

  keys.kinds({"csv"});
  keys.add("targets", AT(data.csv.targets),
           "Columns to be learnt, by name or number (from 0); the last one when empty.");
  keys.add("features", AT(data.csv.features),
           "Columns to learn from, by name or number; all others when empty.");
  keys.add("delimiter", AT(data.csv.delimiter), "Between columns: one character.");
  keys.add("header", AT(data.csv.header), "Whether the first line names the columns.");
  keys.choice("scaling", AT(data.csv.scaling), {"none", "standard"},
              "standard: features get mean 0 and deviation 1, over all ranks' data.");
  keys.choice("bad_rows", AT(data.csv.bad_rows), {"error", "skip"},
              "What to do with rows that cannot be read; those that are skipped are counted.");
  keys.choice("missing_values", AT(data.csv.missing_values), {"bad", "nan"},
              "A feature that is missing makes a bad row, or is NaN.");
  keys.add("classification", AT(data.csv.classification), "Whether targets are class numbers.");

  keys.kinds({"tokens"});
  keys.add("sequence_length", AT(data.tokens.sequence_length), "Tokens of a sample.", at_least(1));
  keys.choice("dtype", AT(data.tokens.dtype), {"uint16", "uint32", "int32", "int64"},
              "Of the tokens in a file of plain numbers; a folder says it itself.");
  keys.add("tokenizer", AT(data.tokens.tokenizer),
           "tokenizer.json, .tiktoken file or folder, for samples; empty: that in `path`.");
  keys.add("mask_boundaries", AT(data.tokens.mask_boundaries),
           "Whether the first token of a document, which nothing tells, is not a target.");
  keys.kinds({"images"});
  keys.add("size", AT(data.images.size), "Width and height to which images are scaled.",
           between(1, 65536));
  keys.add("channels", AT(data.images.channels), "3: colour, 1: grey.", between(1, 3));
  keys.choice("fit", AT(data.images.fit), {"crop", "stretch"},
              "The middle of the image, or the whole of it, made square.");
  keys.choice("bad_images", AT(data.images.bad_images), {"error", "skip"},
              "What to do with files that are not images; those that are skipped are counted.");
  keys.kinds({"synthetic-regression"});
  keys.add("samples", AT(data.synthetic.samples), "How many are made.", at_least(1));
  keys.add("slope", AT(data.synthetic.slope), "Of the line.");
  keys.add("intercept", AT(data.synthetic.intercept), "Of the line.");
  keys.add("noise", AT(data.synthetic.noise), "Standard deviation around the line.", at_least(0));
}

}  // namespace lockstep::train

#undef AT
