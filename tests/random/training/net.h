// The models of random programs: a row of blocks from 6 features to 6, and a head.
#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "random/training/program.h"

namespace lockstep::test::training {

constexpr int64_t kFeatures = 6;
constexpr int64_t kTokens = 7;

// Samples of one rank: n x 6 of data and n targets of double.
struct Batch {
  at::Tensor data;
  at::Tensor target;
};

// For whom and when a forward runs. A lane is the part of the whole batch that one rank has.
struct Moment {
  int lane = 0;
  int lanes = 1;
  int step = 0;
  int micro = 0;
  uint64_t seed = 0;
};

class Block : public torch::nn::Module {
 public:
  // x is n x 6; tokens are n of int64 below kTokens.
  virtual at::Tensor forward(const at::Tensor& x, const at::Tensor& tokens, const Moment& moment) {
    (void)tokens, (void)moment;
    return forward_all({this}, {x}).at(0);
  }
  // Of several ranks together, where a rank's output depends on the others' input. In one process
  // the row holds every rank's block; a rank has but its own.
  virtual bool joins_lanes() const { return false; }
  // That computes it, if there is one.
  virtual const torch::jit::Module* script() const { return nullptr; }
  virtual std::vector<at::Tensor> forward_all(const std::vector<Block*>& row,
                                              const std::vector<at::Tensor>& xs);
};

// Whether a block is left out of a forward.
using Skips = std::function<bool(size_t block, const Moment& moment)>;

class Net : public torch::nn::Module {
 public:
  // Every rank makes it with the same numbers. `group`: for layers that communicate; of one rank
  // where one process computes for all.
  Net(const Program& program, uint64_t salt, const Group& group);

  const std::vector<std::shared_ptr<Block>>& blocks() const { return blocks_; }
  // Block i and block j become one.
  void tie(size_t i, size_t j);

  Skips skips;

  // Outputs, n, of the lane that this process computes for; to be called by lockstep::call().
  at::Tensor forward(const at::Tensor& x, const at::Tensor& tokens, const Moment& moment);
  // The same, n each, of all lanes that this process computes for: nets[i] is lane i's.
  static std::vector<at::Tensor> forward(const std::vector<Net*>& nets,
                                         const std::vector<Batch>& batches,
                                         const std::vector<Moment>& moments);

 private:
  std::vector<std::shared_ptr<Block>> blocks_;
  at::Tensor head_;
};

// Names of all blocks that there are.
std::vector<std::string> block_names();
std::shared_ptr<Block> make_block(const Part& part, const Group& group);
// Adds those of a file to the table by name.
using MakeBlock = std::function<std::shared_ptr<Block>(Random& random, const Group& group)>;
void add_called_blocks(std::map<std::string, MakeBlock>& table);
void add_plain_blocks(std::map<std::string, MakeBlock>& table);
void add_special_blocks(std::map<std::string, MakeBlock>& table);

}  // namespace lockstep::test::training
