// Keys and values of the tokens that a transformer has seen.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::models {

// Memory for all tokens is allocated at the beginning; each sequence has its own number of tokens.
// For one thread, without gradients.
class KvCache {
 public:
  // The keys and values of one layer: sequences x heads x length x head_dim each.
  struct Layer {
    at::Tensor keys, values;
  };

  // An empty one. `frequencies` of the positions' angles are the model's; without them it computes
  // them for each token.
  KvCache(std::vector<Layer> layers, int64_t sequences, int64_t length,
          std::vector<float> frequencies = {});
  // A copy would store its tokens in the same memory; keep() gives sequences that are there twice.
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;
  KvCache(KvCache&&) = default;
  KvCache& operator=(KvCache&&) = default;

  // How many sequences there are, and how many tokens of each there is memory for.
  int64_t sequences() const { return static_cast<int64_t>(lengths_.size()); }
  // See sequences().
  int64_t capacity() const { return capacity_; }

  // Tokens of each sequence. Setting them makes a cache shorter, as after a prompt that was filled
  // up with padding; throws ConfigError for more tokens than there are.
  const std::vector<int64_t>& lengths() const { return lengths_; }
  void set_lengths(std::vector<int64_t> lengths);

  // Only these sequences, in this order; one may come several times, such as a prompt that several
  // answers begin with. Throws ConfigError, and changes nothing, for none and for one that is not
  // there.
  void keep(const std::vector<int64_t>& sequences);

  // The positions of the next `count` tokens, sequences x count; 1 x count when all sequences have
  // the same length.
  at::Tensor positions(int64_t count) const;

  // Stores the keys and values (sequences x heads x count x head_dim) after the sequences' earlier
  // tokens. Returns those of all tokens up to the longest sequence's end. advance() makes them
  // count.
  Layer extend(int64_t layer, const at::Tensor& keys, const at::Tensor& values);

  // All memory of a layer, sequences x heads x capacity() x head_dim, for what stores by itself.
  Layer& memory(int64_t layer) { return layers_.at(static_cast<size_t>(layer)); }
  // Throws ConfigError when `count` more tokens do not fit.
  void check_room(int64_t count) const;
  // The frequencies that the constructor was given.
  const std::vector<float>& frequencies() const { return frequencies_; }

  // What each of `count` new tokens may look at among what extend() returns: sequences x 1 x count
  // x tokens, true where it may; undefined when a causal kernel or none at all does the same.
  at::Tensor mask(int64_t count) const;
  // Whether all sequences have the same number of tokens.
  bool even() const;
  bool empty() const;

  // After all layers: `count` tokens more in each sequence.
  void advance(int64_t count);

 private:
  // What does not depend on the layer, of the next `count` tokens.
  struct Step {
    int64_t count = -1;
    at::Tensor positions, mask;
  };
  const Step& step(int64_t count) const;

  std::vector<Layer> layers_;
  std::vector<int64_t> lengths_;
  int64_t capacity_;
  std::vector<float> frequencies_;
  mutable Step step_;
};

}  // namespace lockstep::models
