#include "parallel/optimizer_pieces.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <sstream>

namespace lockstep::parallel {
namespace {

template <class Kind>
std::string saved(const Kind& what) {
  torch::serialize::OutputArchive archive;
  what.serialize(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

at::Tensor number(int64_t value) { return at::scalar_tensor(value, at::kLong); }

template <class Adam>
std::vector<OptimizerPiece> of_adam(const Adam& state) {
  return {{"step", number(state.step())},
          {"exp_avg", state.exp_avg()},
          {"exp_avg_sq", state.exp_avg_sq()},
          {"max_exp_avg_sq", state.max_exp_avg_sq()}};
}

}  // namespace

std::vector<OptimizerPiece> pieces_of(const torch::optim::OptimizerParamState& state) {
  using namespace torch::optim;
  std::vector<OptimizerPiece> pieces;
  if (const auto* adam = dynamic_cast<const AdamParamState*>(&state)) {
    pieces = of_adam(*adam);
  } else if (const auto* adamw = dynamic_cast<const AdamWParamState*>(&state)) {
    pieces = of_adam(*adamw);
  } else if (const auto* sgd = dynamic_cast<const SGDParamState*>(&state)) {
    pieces = {{"momentum_buffer", sgd->momentum_buffer()}};
  } else if (const auto* rmsprop = dynamic_cast<const RMSpropParamState*>(&state)) {
    pieces = {{"step", number(rmsprop->step())},
              {"square_avg", rmsprop->square_avg()},
              {"momentum_buffer", rmsprop->momentum_buffer()},
              {"grad_avg", rmsprop->grad_avg()}};
  } else if (const auto* adagrad = dynamic_cast<const AdagradParamState*>(&state)) {
    pieces = {{"step", number(adagrad->step())}, {"sum", adagrad->sum()}};
  } else {
    const std::string bytes = saved(state);
    pieces = {{"state", at::empty({static_cast<int64_t>(bytes.size())}, at::kByte)}};
    std::copy(bytes.begin(), bytes.end(), pieces.front().tensor.mutable_data_ptr<uint8_t>());
  }
  std::erase_if(pieces, [](const OptimizerPiece& piece) { return !piece.tensor.defined(); });
  return pieces;
}

std::string bytes_of(const torch::optim::OptimizerOptions& options) { return saved(options); }

}  // namespace lockstep::parallel
