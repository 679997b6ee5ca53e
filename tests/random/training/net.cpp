#include "random/training/net.h"

#include <torch/torch.h>

#include "lockstep/parallel/call.h"

namespace lockstep::test::training {
namespace {

const std::map<std::string, MakeBlock>& table_of_blocks() {
  static const auto table = [] {
    std::map<std::string, MakeBlock> made;
    add_called_blocks(made);
    add_plain_blocks(made);
    add_special_blocks(made);
    return made;
  }();
  return table;
}

}  // namespace

std::vector<at::Tensor> Block::forward_all(const std::vector<Block*>&,
                                           const std::vector<at::Tensor>& xs) {
  return xs;
}

std::vector<std::string> block_names() {
  std::vector<std::string> names;
  for (const auto& [name, make] : table_of_blocks()) names.push_back(name);
  return names;
}

std::shared_ptr<Block> make_block(const Part& part, const Group& group) {
  Random random(part.seed);
  torch::manual_seed(static_cast<uint64_t>(random.below(1 << 30)));
  return table_of_blocks().at(part.name)(random, group);
}

Net::Net(const Program& program, uint64_t salt, const Group& group) {
  for (size_t i = 0; i < program.layers.size(); ++i) {
    Part part = program.layers[i];
    part.seed += salt;
    blocks_.push_back(register_module("b" + std::to_string(i), make_block(part, group)));
  }
  torch::manual_seed(program.seed + salt);
  head_ = register_parameter("head", torch::randn({kFeatures}, at::kDouble));
}

void Net::tie(size_t i, size_t j) {
  blocks_[j] = blocks_[i];
  replace_module("b" + std::to_string(j), blocks_[i]);
}

at::Tensor Net::forward(const at::Tensor& x, const at::Tensor& tokens, const Moment& moment) {
  at::Tensor y = x;
  for (size_t block = 0; block < blocks_.size(); ++block) {
    const bool joins = blocks_[block]->joins_lanes();
    if (!joins && skips && skips(block, moment)) continue;
    y = lockstep::call(blocks_[block], y, tokens, moment);
  }
  return at::mv(y, head_);
}

std::vector<at::Tensor> Net::forward(const std::vector<Net*>& nets,
                                     const std::vector<Batch>& batches,
                                     const std::vector<Moment>& moments) {
  std::vector<at::Tensor> xs, tokens;
  for (const auto& batch : batches) {
    xs.push_back(batch.data);
    tokens.push_back((batch.data.select(1, 0).abs() * 1000).to(at::kLong).remainder(kTokens));
  }
  if (nets.size() == 1) return {lockstep::call(*nets[0], xs[0], tokens[0], moments[0])};
  for (size_t block = 0; block < nets[0]->blocks_.size(); ++block) {
    if (nets[0]->blocks_[block]->joins_lanes()) {
      std::vector<Block*> row;
      for (const Net* net : nets) row.push_back(net->blocks_[block].get());
      xs = row[0]->forward_all(row, xs);
      continue;
    }
    for (size_t lane = 0; lane < nets.size(); ++lane) {
      if (nets[lane]->skips && nets[lane]->skips(block, moments[lane])) continue;
      xs[lane] = nets[lane]->blocks_[block]->forward(xs[lane], tokens[lane], moments[lane]);
    }
  }
  std::vector<at::Tensor> outputs;
  for (size_t lane = 0; lane < nets.size(); ++lane) {
    outputs.push_back(at::mv(xs[lane], nets[lane]->head_));
  }
  return outputs;
}

}  // namespace lockstep::test::training
