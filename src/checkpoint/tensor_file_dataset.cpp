#include "lockstep/checkpoint/tensor_file_dataset.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <cstring>

#include "core/nearest.h"
#include "lockstep/checkpoint/state.h"
#include "lockstep/checkpoint/tensor_files.h"
#include "lockstep/core/error.h"

namespace lockstep::checkpoint {
namespace {

at::Tensor tensor_of(TensorFiles& files, const std::string& name) {
  const auto alias = files.aliases().find(name);
  const std::string& stored = alias == files.aliases().end() ? name : alias->second;
  const auto found = files.tensors().find(stored);
  if (found == files.tensors().end()) {
    std::vector<std::string> names;
    for (const auto& [known, tensor] : files.tensors()) names.push_back(known);
    throw DataError(fmt::format("[tensor file] {} has no tensor '{}': there are {}{}", files.path(),
                                name,
                                names.size() > 20 ? fmt::format("{} others", names.size())
                                                  : fmt::format("{}", fmt::join(names, ", ")),
                                hint_of(name, names, "; did you mean '", "'?")));
  }
  const TensorBytes bytes = files.read(stored);
  const auto type = scalar_type_of(found->second.dtype);
  at::Tensor tensor = at::empty(found->second.sizes, type);
  if (tensor.nbytes() != bytes.view().size()) {
    throw DataError(
        fmt::format("[tensor file] {}: '{}' has elements of a dtype, {}, that is not a "
                    "sample's",
                    files.path(), name, found->second.dtype));
  }
  if (tensor.nbytes() > 0) std::memcpy(tensor.data_ptr(), bytes.view().data(), tensor.nbytes());
  if (tensor.dim() < 1 || tensor.size(0) == 0) {
    throw DataError(
        fmt::format("[tensor file] {}: '{}' [{}] has no samples along a first dimension",
                    files.path(), name, fmt::join(tensor.sizes(), ", ")));
  }
  return tensor;
}

at::Tensor columns_of(TensorFiles& files, const std::vector<std::string>& names) {
  if (names.empty()) throw ConfigError("[tensor file] give at least one name of data and targets");
  if (names.size() == 1) return tensor_of(files, names[0]);
  std::vector<at::Tensor> columns;
  for (const auto& name : names) {
    const at::Tensor tensor = tensor_of(files, name);
    columns.push_back(tensor.dim() == 1 ? tensor.unsqueeze(1) : tensor.flatten(1));
    columns.back() = columns.back().to(at::kFloat);
    if (columns.back().size(0) != columns[0].size(0)) {
      throw DataError(fmt::format("[tensor file] {}: '{}' has {} samples, and '{}' has {}",
                                  files.path(), name, columns.back().size(0), names[0],
                                  columns[0].size(0)));
    }
  }
  return at::cat(columns, 1);
}

data::TensorDataset read(const std::string& path, const TensorFileOptions& options) {
  const auto files = open_tensors(path);
  const at::Tensor samples = columns_of(*files, options.data);
  at::Tensor targets = columns_of(*files, options.targets);
  if (at::isIntegralType(targets.scalar_type(), /*includeBool=*/true))
    targets = targets.to(at::kLong);
  if (samples.size(0) != targets.size(0)) {
    throw DataError(fmt::format("[tensor file] {}: '{}' has {} samples, and '{}' has {}", path,
                                options.data[0], samples.size(0), options.targets[0],
                                targets.size(0)));
  }
  return {samples, targets};
}

}  // namespace

TensorFileDataset::TensorFileDataset(const std::string& path, const TensorFileOptions& options)
    : TensorDataset(read(path, options)) {}

}  // namespace lockstep::checkpoint
