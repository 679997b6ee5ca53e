#include <fmt/format.h>

#include "checkpoint/format/json.h"
#include "lockstep/checkpoint/error.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/tensor_files.h"

namespace lockstep::checkpoint {

int64_t element_bytes(const std::string& dtype) {
  if (dtype == "C128") return 16;
  const auto known = Dtype::named(dtype);
  if (!known) throw CheckpointError(fmt::format("[checkpoint] unknown dtype {}", in_quotes(dtype)));
  return known->bytes();
}

int64_t bytes_of(const StoredTensor& tensor) {
  return element_bytes(tensor.dtype) * elements(tensor.sizes);
}

void TensorFiles::need(const std::string& name) const {
  if (tensors_.contains(name)) return;
  throw CheckpointError(fmt::format("[checkpoint] {} has no tensor '{}'", path_, name));
}

}  // namespace lockstep::checkpoint
