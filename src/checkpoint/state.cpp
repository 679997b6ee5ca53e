#include "lockstep/checkpoint/state.h"

#include <fmt/format.h>

#include <algorithm>

#include "comm/transport.h"
#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {
namespace {

constexpr std::pair<at::ScalarType, const char*> kTypes[] = {{at::kBool, "BOOL"},
                                                             {at::kByte, "U8"},
                                                             {at::kChar, "I8"},
                                                             {at::kFloat8_e5m2, "F8_E5M2"},
                                                             {at::kFloat8_e4m3fn, "F8_E4M3"},
                                                             {at::kFloat8_e8m0fnu, "F8_E8M0"},
                                                             {at::kFloat8_e4m3fnuz, "F8_E4M3FNUZ"},
                                                             {at::kFloat8_e5m2fnuz, "F8_E5M2FNUZ"},
                                                             {at::kShort, "I16"},
                                                             {at::kUInt16, "U16"},
                                                             {at::kHalf, "F16"},
                                                             {at::kBFloat16, "BF16"},
                                                             {at::kInt, "I32"},
                                                             {at::kUInt32, "U32"},
                                                             {at::kFloat, "F32"},
                                                             {at::kLong, "I64"},
                                                             {at::kUInt64, "U64"},
                                                             {at::kDouble, "F64"},
                                                             {at::kComplexFloat, "C64"},
                                                             {at::kComplexDouble, "C128"}};

template <class T>
const T* holds(const Value& value) {
  return std::get_if<T>(&value);
}

}  // namespace

Piece whole_piece(std::string name, const at::Tensor& tensor) {
  const auto sizes = tensor.sizes().vec();
  return {std::move(name), tensor.scalar_type(), sizes, {{whole(sizes), tensor.detach()}}};
}

std::string pattern_of(const std::string& name) {
  std::string pattern;
  for (const char letter : name) {
    if (std::string_view("*?[]\\").find(letter) != std::string_view::npos) pattern += '\\';
    pattern += letter;
  }
  return pattern;
}

bool Saved::has_like(const Values& others) const {
  return std::ranges::all_of(others, [this](const auto& other) {
    const auto found = values.find(other.first);
    return found != values.end() && found->second.index() == other.second.index();
  });
}

void Names::add(const at::Tensor& tensor, const std::string& name) {
  auto& all = names_[tensor.unsafeGetTensorImpl()];
  if (std::ranges::find(all, name) == all.end()) all.push_back(name);
}

void Names::add_aliases(const std::map<std::string, std::string>& aliases) {
  for (auto& [tensor, all] : names_) {
    const size_t own = all.size();
    for (size_t i = 0; i < own; ++i) {
      const auto found = aliases.find(all[i]);
      if (found == aliases.end() || std::ranges::find(all, found->second) != all.end()) continue;
      all.push_back(found->second);
    }
  }
}

std::optional<std::string> Names::of(const at::Tensor& tensor) const {
  const auto found = names_.find(tensor.unsafeGetTensorImpl());
  return found == names_.end() ? std::nullopt : std::optional(found->second.front());
}

std::vector<std::string> Names::all(const at::Tensor& tensor) const {
  const auto found = names_.find(tensor.unsafeGetTensorImpl());
  return found == names_.end() ? std::vector<std::string>() : found->second;
}

template <class T>
T value_of(const Values& values, const std::string& name) {
  const auto found = values.find(name);
  if (found == values.end()) {
    throw CheckpointError(fmt::format("[checkpoint] there is no value '{}'", name));
  }
  if (const T* value = holds<T>(found->second)) return *value;
  if constexpr (std::is_same_v<T, std::vector<double>>) {
    // An empty list is of both.
    const auto* list = holds<std::vector<int64_t>>(found->second);
    if (list != nullptr && list->empty()) return {};
  }
  throw CheckpointError(fmt::format("[checkpoint] the value '{}' is of another type", name));
}

template bool value_of(const Values&, const std::string&);
template int64_t value_of(const Values&, const std::string&);
template double value_of(const Values&, const std::string&);
template std::string value_of(const Values&, const std::string&);
template std::vector<double> value_of(const Values&, const std::string&);

at::ScalarType scalar_type_of(const std::string& dtype) {
  for (const auto& [type, name] : kTypes) {
    if (dtype == name) return type;
  }
  throw CheckpointError(fmt::format("[checkpoint] libtorch has no dtype {}", dtype));
}

std::string dtype_of(at::ScalarType type) {
  for (const auto& [known, name] : kTypes) {
    if (type == known) return name;
  }
  throw CheckpointError(
      fmt::format("[checkpoint] tensors of {} cannot be saved", comm::name_of(type)));
}

}  // namespace lockstep::checkpoint
