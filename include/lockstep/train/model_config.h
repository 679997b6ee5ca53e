// Sections `model` and `data` of a configuration. In a file the keys of a kind stand beside `kind`:
//
//   model: {kind: mlp, hidden: [256], outputs: 10}
//
// A key of another kind is an error. Needs no torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::train {

// kind: linear.
struct LinearConfig {
  int64_t inputs = 0;   // 0: as many as a sample has
  int64_t outputs = 0;  // 0: as many as there are classes or target columns
  bool bias = true;
};

// kind: mlp: fully connected layers with an activation between each two.
struct MlpConfig {
  int64_t inputs = 0;   // 0: as many as a sample has
  int64_t outputs = 0;  // 0: as many as there are classes or target columns
  std::vector<int64_t> hidden = {256};
  std::string activation = "relu";  // leaky_relu, elu, gelu, silu, tanh, sigmoid, identity
  double dropout = 0;               // after each activation
};

// kind: convnet: blocks of convolution, BatchNorm, ReLU and pooling, then one linear layer.
struct ConvnetConfig {
  int64_t outputs = 0;                       // 0: as many as there are classes
  std::vector<int64_t> channels = {32, 64};  // of each block
  double dropout = 0;                        // before the linear layer
  bool batch_norm = true;
};

// kind: resnet18.
struct Resnet18Config {
  int64_t outputs = 0;  // 0: as many as there are classes
  // The first layer for small images (3 x 3, no pooling) instead of ImageNet's (7 x 7, pooling).
  bool small_images = true;
};

// kind: transformer: a decoder for token data, in Qwen 3's layout.
struct TransformerConfig {
  std::string pretrained = {};  // a folder in the format of Hugging Face; then it gives the sizes
  int64_t vocabulary = 0;       // 0: that of the tokenizer or data
  int64_t layers = 4;
  int64_t hidden = 256;       // width
  int64_t feed_forward = 0;   // width within; 0: 3 x hidden
  int64_t heads = 4;          // of queries
  int64_t kv_heads = 0;       // of keys and values; 0: heads
  int64_t head_dim = 0;       // 0: hidden / heads
  int64_t max_length = 1024;  // tokens of a sequence
  bool tied = true;           // the embedding is the output layer's weight, too
  double rope_theta = 1e6;
  double norm_eps = 1e-6;
  double dropout = 0;
};

// Section `model`.
struct ModelConfig {
  // linear, mlp, convnet, resnet18, transformer, or a kind that the program has declared. Of the
  // structs below the one of this kind counts.
  std::string kind = "mlp";
  LinearConfig linear = {};
  MlpConfig mlp = {};
  ConvnetConfig convnet = {};
  Resnet18Config resnet18 = {};
  TransformerConfig transformer = {};
};

// kind: csv.
struct CsvConfig {
  std::vector<std::string> targets = {};   // columns, by name or number; the last one when empty
  std::vector<std::string> features = {};  // all other columns when empty
  std::string delimiter = ",";
  bool header = true;                  // the first line names the columns
  std::string scaling = "none";        // none, standard (mean 0, deviation 1, over all ranks' data)
  std::string bad_rows = "error";      // error, skip (and count)
  std::string missing_values = "bad";  // bad (a bad row), nan
  bool classification = false;         // targets are class numbers
};

// kind: tokens.
struct TokensConfig {
  int64_t sequence_length = 256;
  std::string dtype = "uint16";  // of a file of plain numbers: uint16, uint32, int32, int64
  std::string tokenizer = {};    // file or folder; empty: that in the folder of the tokens
  bool mask_boundaries = false;  // the first token of a document is not a target
};

// kind: images: one folder per class, PNG and JPEG.
struct ImagesConfig {
  int64_t size = 224;                // width and height to which images are scaled
  int64_t channels = 3;              // 1: grey
  std::string fit = "crop";          // the middle of the image; stretch
  std::string bad_images = "error";  // error, skip (and count)
};

// kind: synthetic-regression: y = slope x + intercept + noise.
struct SyntheticConfig {
  int64_t samples = 1024;
  double slope = 2;
  double intercept = 3;
  double noise = 0.1;
};

// Section `data`.
struct DataConfig {
  // fashion-mnist, mnist, idx, csv, npy, safetensors, images, tokens, synthetic-regression, or a
  // kind that the program has declared. Of the structs below the one of this kind counts.
  std::string kind = "fashion-mnist";
  std::string path = {};             // file or folder; fashion-mnist knows Debian's when empty
  std::string targets_path = {};     // npy, idx: the file of targets or labels
  std::string validation_path = {};  // of the same kind; empty: see validation_fraction
  std::string validation_targets_path = {};  // npy, idx
  // The last share of the samples is for evaluation; with a validation set of its own: 0.
  double validation_fraction = 0;
  int64_t max_samples = 0;  // the first N; 0: all
  bool shuffle = true;
  bool drop_last = false;
  int64_t workers = 0;                // threads that make batches; 0: none
  int64_t prefetch = 0;               // batches ahead
  std::string inputs_key = "inputs";  // safetensors: the tensors' names
  std::string targets_key = "targets";
  CsvConfig csv = {};
  TokensConfig tokens = {};
  ImagesConfig images = {};
  SyntheticConfig synthetic = {};
};

}  // namespace lockstep::train
