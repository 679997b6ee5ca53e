#include "checkpoint/stored_view.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "lockstep/checkpoint/state.h"

namespace lockstep::checkpoint {

at::Tensor view_of(std::string_view bytes, const StoredTensor& stored) {
  // from_blob refuses null, which an empty tensor has.
  static char nothing = 0;
  char* data = bytes.empty() ? &nothing : const_cast<char*>(bytes.data());
  return at::from_blob(data, stored.sizes, at::dtype(scalar_type_of(stored.dtype)));
}

std::string type_text(const std::string& dtype, at::IntArrayRef sizes) {
  return fmt::format("{} [{}]", dtype, fmt::join(sizes, ", "));
}

std::string obstacle_to_writing(const at::Tensor& target) {
  if (target.is_meta()) return "it is on the meta device, without memory";
  if (at::has_internal_overlap(target) == at::MemOverlap::Yes) return "elements of it share memory";
  return "";
}

}  // namespace lockstep::checkpoint
