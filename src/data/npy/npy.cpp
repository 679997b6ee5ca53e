#include "lockstep/data/npy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "data/mapped_bytes.h"
#include "data/npy/npy_header.h"
#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

static_assert(std::endian::native == std::endian::little, "elements are swapped for this order");

at::ScalarType stored_type(const NpyHeader& header) {
  switch (header.kind) {
    case 'b':
      return at::kBool;
    case 'u':
      if (header.element_bytes == 1) return at::kByte;
      [[fallthrough]];  // bits are read as signed, then widened
    case 'i':
      return header.element_bytes == 1   ? at::kChar
             : header.element_bytes == 2 ? at::kShort
             : header.element_bytes == 4 ? at::kInt
                                         : at::kLong;
    case 'f':
      return header.element_bytes == 2   ? at::kHalf
             : header.element_bytes == 4 ? at::kFloat
                                         : at::kDouble;
    default:
      return header.element_bytes == 8 ? at::kComplexFloat : at::kComplexDouble;
  }
}

// The halves of a complex number are swapped each.
void swap_bytes(char* bytes, int64_t count, const NpyHeader& header) {
  const int64_t width = header.kind == 'c' ? header.element_bytes / 2 : header.element_bytes;
  for (int64_t i = 0; i < count; i += width) std::reverse(bytes + i, bytes + i + width);
}

at::Tensor widened(const at::Tensor& bits, const NpyHeader& header, const std::string& name) {
  if (header.kind != 'u' || header.element_bytes == 1) return bits;
  if (header.element_bytes == 2) return bits.to(at::kInt).bitwise_and(0xffff);
  if (header.element_bytes == 4) return bits.to(at::kLong).bitwise_and(int64_t{0xffffffff});
  if (bits.lt(0).any().item<bool>()) {
    throw DataError(fmt::format("[npy] {}: numbers of uint64 beyond 2^63 are not supported", name));
  }
  return bits;
}

at::Tensor features(at::Tensor data, const std::filesystem::path& file) {
  if (data.is_complex()) {
    throw DataError(fmt::format("[npy] {}: complex data are not features", file.string()));
  }
  return data.is_floating_point() ? data : data.to(at::kFloat);
}

at::Tensor targets(at::Tensor target) {
  return at::isIntegralType(target.scalar_type(), /*includeBool=*/true) ? target.to(at::kLong)
                                                                        : target;
}

at::Tensor of_samples(at::Tensor array, const std::filesystem::path& file) {
  if (array.dim() > 0 && array.size(0) > 0) return array;
  throw DataError(fmt::format("[npy] {}: [{}] has no samples along a first dimension",
                              file.string(), fmt::join(array.sizes(), ", ")));
}

}  // namespace

at::Tensor read_npy(const std::filesystem::path& file) {
  const MappedBytes mapped(file, "[npy]");
  const std::string name = file.string();
  const NpyHeader header = parse_npy(mapped.view(), name);
  std::vector<int64_t> stored = header.sizes;
  if (header.fortran) std::reverse(stored.begin(), stored.end());
  at::Tensor array = at::empty(stored, stored_type(header));
  auto* bytes = static_cast<char*>(array.data_ptr());
  const int64_t count = header.elements * header.element_bytes;
  if (count > 0)
    std::memcpy(bytes, mapped.view().data() + header.begin, static_cast<size_t>(count));
  if (header.swapped) swap_bytes(bytes, count, header);
  if (header.kind == 'b') {
    // Bytes other than 0 and 1 are not a valid bool in C++.
    for (int64_t i = 0; i < count; ++i) bytes[i] = static_cast<char>(bytes[i] != 0);
  }
  array = widened(array, header, name);
  if (!header.fortran) return array;
  std::vector<int64_t> order(stored.size());
  for (size_t i = 0; i < order.size(); ++i)
    order[i] = std::ssize(order) - 1 - static_cast<int64_t>(i);
  return array.permute(order).contiguous();
}

NpyDataset::NpyDataset(const std::filesystem::path& data, const std::filesystem::path& target)
    : TensorDataset([&] {
        const at::Tensor samples = of_samples(features(read_npy(data), data), data);
        const at::Tensor wanted = of_samples(targets(read_npy(target)), target);
        if (samples.size(0) != wanted.size(0)) {
          throw DataError(fmt::format("[npy] {} has {} samples, and {} has {}", data.string(),
                                      samples.size(0), target.string(), wanted.size(0)));
        }
        return TensorDataset(samples, wanted);
      }()) {}

}  // namespace lockstep::data
