#include "lockstep/data/idx_dataset.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include "lockstep/core/error.h"
#include "lockstep/data/idx.h"

namespace lockstep::data {
namespace {

TensorDataset read(const std::filesystem::path& data, const std::filesystem::path& labels) {
  IdxArray target = read_idx(labels);
  if (target.sizes.size() != 1) {
    throw DataError(fmt::format("[idx] {}: labels have one dimension, not {}", labels.string(),
                                fmt::join(target.sizes, " x ")));
  }
  IdxArray samples = read_idx(data);
  if (samples.sizes[0] != target.sizes[0] || target.sizes[0] == 0) {
    throw DataError(
        fmt::format("[idx] {} samples in {}, {} labels in {}: needs as many, and one at "
                    "least",
                    samples.sizes[0], data.string(), target.sizes[0], labels.string()));
  }
  const auto bytes = [](IdxArray& array) {
    return at::from_blob(array.bytes.data(), array.sizes, at::kByte);
  };
  return {bytes(samples).to(at::kFloat).div_(255), bytes(target).to(at::kLong)};
}

}  // namespace

IdxDataset::IdxDataset(const std::filesystem::path& data, const std::filesystem::path& labels)
    : TensorDataset(read(data, labels)) {}

}  // namespace lockstep::data
