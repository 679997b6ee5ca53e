#include "parallel/optim/optimizer_pieces.h"

#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <algorithm>
#include <sstream>
#include <variant>

#include "checkpoint/optimizer_fields.h"

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

}  // namespace

std::vector<OptimizerPiece> pieces_of(const torch::optim::OptimizerParamState& state) {
  std::vector<OptimizerPiece> pieces;
  // Nothing is changed by way of these references.
  for (const auto& field :
       checkpoint::fields_of(const_cast<torch::optim::OptimizerParamState&>(state))) {
    const auto* tensor = std::get_if<at::Tensor*>(&field.value);
    pieces.push_back(
        {field.name, tensor != nullptr
                         ? **tensor
                         : at::scalar_tensor(*std::get<int64_t*>(field.value), at::kLong)});
  }
  if (pieces.empty()) {  // of no class that is known
    const std::string bytes = saved(state);
    pieces = {{"state", at::empty({static_cast<int64_t>(bytes.size())}, at::kByte)}};
    std::copy(bytes.begin(), bytes.end(), pieces.front().tensor.mutable_data_ptr<uint8_t>());
  }
  std::erase_if(pieces, [](const OptimizerPiece& piece) { return !piece.tensor.defined(); });
  return pieces;
}

std::string bytes_of(const torch::optim::OptimizerOptions& options) { return saved(options); }

}  // namespace lockstep::parallel
