#include "checkpoint/format/torch_save/pickle_calls.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "checkpoint/format/json.h"

namespace lockstep::checkpoint {
namespace {

using Arguments = std::vector<const PickledValue*>;

constexpr std::pair<std::string_view, const char*> kStorages[] = {
    {"torch.FloatStorage", "F32"},        {"torch.DoubleStorage", "F64"},
    {"torch.HalfStorage", "F16"},         {"torch.BFloat16Storage", "BF16"},
    {"torch.LongStorage", "I64"},         {"torch.IntStorage", "I32"},
    {"torch.ShortStorage", "I16"},        {"torch.CharStorage", "I8"},
    {"torch.ByteStorage", "U8"},          {"torch.BoolStorage", "BOOL"},
    {"torch.ComplexFloatStorage", "C64"}, {"torch.ComplexDoubleStorage", "C128"},
    {"torch.storage.UntypedStorage", ""}, {"torch.UntypedStorage", ""}};

constexpr std::pair<std::string_view, const char*> kDtypes[] = {
    {"torch.float32", "F32"},
    {"torch.float64", "F64"},
    {"torch.float16", "F16"},
    {"torch.bfloat16", "BF16"},
    {"torch.int64", "I64"},
    {"torch.int32", "I32"},
    {"torch.int16", "I16"},
    {"torch.int8", "I8"},
    {"torch.uint8", "U8"},
    {"torch.uint16", "U16"},
    {"torch.uint32", "U32"},
    {"torch.uint64", "U64"},
    {"torch.bool", "BOOL"},
    {"torch.complex64", "C64"},
    {"torch.complex128", "C128"},
    {"torch.float8_e5m2", "F8_E5M2"},
    {"torch.float8_e4m3fn", "F8_E4M3"},
    {"torch.float8_e8m0fnu", "F8_E8M0"},
    {"torch.float8_e4m3fnuz", "F8_E4M3FNUZ"},
    {"torch.float8_e5m2fnuz", "F8_E5M2FNUZ"}};

// TorchScript writes lists of one type by a call, which gives the list.
constexpr std::array<std::string_view, 5> kLists = {
    "torch.jit._pickle.build_intlist", "torch.jit._pickle.build_doublelist",
    "torch.jit._pickle.build_boollist", "torch.jit._pickle.build_tensorlist",
    "torch.jit._pickle.restore_type_tag"};

constexpr std::string_view kTensor2 = "torch._utils._rebuild_tensor_v2";
constexpr std::string_view kTensor3 = "torch._utils._rebuild_tensor_v3";
constexpr std::string_view kParameter = "torch._utils._rebuild_parameter";
constexpr std::string_view kParameterWithState = "torch._utils._rebuild_parameter_with_state";
constexpr std::string_view kFromType = "torch._tensor._rebuild_from_type_v2";
constexpr std::string_view kOrderedDict = "collections.OrderedDict", kSize = "torch.Size";
// What MultiStepLR counts its milestones with, and what configurations name.
constexpr std::string_view kCounter = "collections.Counter", kDevice = "torch.device";
constexpr std::string_view kOthers[] = {kTensor2,
                                        kTensor3,
                                        kParameter,
                                        kParameterWithState,
                                        kFromType,
                                        kOrderedDict,
                                        kSize,
                                        kCounter,
                                        kDevice,
                                        "torch.Tensor",
                                        "torch.nn.parameter.Parameter"};

template <class Table>
auto find(const Table& table, std::string_view name) {
  return std::find_if(std::begin(table), std::end(table),
                      [&](const auto& one) { return one.first == name; });
}
template <class List>
bool is_in(const List& list, std::string_view name) {
  return std::find(std::begin(list), std::end(list), name) != std::end(list);
}

constexpr size_t kMostDimensions = 64;

// A call's arguments, each of the kind that is expected.
class Call {
 public:
  Call(const std::string& name, const Arguments& arguments, const Complain& complain)
      : name_(name), arguments_(arguments), complain_(complain) {}

  const PickledValue& at(size_t index, PickledValue::Kind kind) const {
    if (index >= arguments_.size() || arguments_[index]->kind != kind) {
      refuse(fmt::format("has no argument {} of the kind that is expected", index));
    }
    return *arguments_[index];
  }
  Sizes numbers(size_t index) const {
    Sizes numbers;
    if (at(index, PickledValue::List).items.size() > kMostDimensions)
      refuse("has more than 64 dimensions");
    for (const PickledValue* item : arguments_[index]->items) {
      if (item->kind != PickledValue::Int || item->integer < 0) {
        refuse("has sizes or strides that are not whole numbers from 0");
      }
      numbers.push_back(item->integer);
    }
    return numbers;
  }
  // Hooks and attributes: nothing to be done.
  void expect_empty(size_t index, const char* what) const {
    if (index >= arguments_.size() || arguments_[index]->kind == PickledValue::None) return;
    if (arguments_[index]->kind != PickledValue::Dict || !arguments_[index]->items.empty()) {
      refuse(fmt::format("has {}, which are not read", what));
    }
  }
  // As in {'conj': True}: the bytes are not the tensor's numbers then.
  void expect_plain(size_t index) const {
    if (index >= arguments_.size() || arguments_[index]->kind == PickledValue::None) return;
    const auto& items = at(index, PickledValue::Dict).items;
    for (size_t i = 1; i < items.size(); i += 2) {
      if (items[i]->kind != PickledValue::Bool || items[i]->integer != 0) {
        refuse(
            fmt::format("has the property {}, which is not read: save tensor.resolve_conj() and "
                        "resolve_neg()",
                        in_quotes(items[i - 1]->text)));
      }
    }
  }
  [[noreturn]] void refuse(const std::string& text) const {
    complain_(fmt::format("a call of {} {}", name_, text));
    __builtin_unreachable();  // it throws
  }

 private:
  const std::string& name_;
  const Arguments& arguments_;
  const Complain& complain_;
};

// (storage, offset, sizes, strides, requires_grad, hooks, [dtype,] metadata)
PickledValue tensor_of(const Call& call, bool has_dtype) {
  const PickledValue& storage = call.at(0, PickledValue::Storage);
  PickledValue value{.kind = PickledValue::Tensor};
  PickledTensor& tensor = value.tensor.emplace(*storage.tensor);
  tensor.offset = call.at(1, PickledValue::Int).integer;
  tensor.sizes = call.numbers(2);
  tensor.strides = call.numbers(3);
  call.expect_empty(5, "backward hooks");
  if (has_dtype) {
    const std::string& name = call.at(6, PickledValue::Name).text;
    const auto known = find(kDtypes, name);
    if (known == std::end(kDtypes))
      call.refuse(fmt::format("names {}, which is not a dtype", name));
    tensor.dtype = known->second;
  }
  call.expect_plain(has_dtype ? 7 : 6);
  if (tensor.dtype.empty()) call.refuse("is of a storage without a dtype");
  if (tensor.offset < 0 || tensor.sizes.size() != tensor.strides.size()) {
    call.refuse("has an offset below 0, or not one stride for each size");
  }
  return value;
}

// "cuda:1"
PickledValue device_of(const Arguments& arguments, const Call& call) {
  PickledValue value{.kind = PickledValue::Text, .text = call.at(0, PickledValue::Text).text};
  if (arguments.size() > 1) value.text += fmt::format(":{}", call.at(1, PickledValue::Int).integer);
  return value;
}

PickledValue dict_of(const Arguments& arguments, const Call& call) {
  PickledValue value{.kind = PickledValue::Dict};
  if (arguments.empty()) return value;
  for (const PickledValue* pair : call.at(0, PickledValue::List).items) {
    if (pair->kind != PickledValue::List || pair->items.size() != 2)
      call.refuse("has items that are not pairs");
    value.items.insert(value.items.end(), pair->items.begin(), pair->items.end());
  }
  return value;
}

}  // namespace

bool is_known_name(const std::string& name) {
  return find(kStorages, name) != std::end(kStorages) || find(kDtypes, name) != std::end(kDtypes) ||
         is_in(kLists, name) || is_in(kOthers, name) || name.starts_with("__torch__.");
}

PickledValue call_of(const std::string& name, const Arguments& arguments,
                     const Complain& complain) {
  const Call call(name, arguments, complain);
  if (name == kTensor2) return tensor_of(call, false);
  if (name == kTensor3) return tensor_of(call, true);
  if (name == kParameter || name == kParameterWithState) {
    call.expect_empty(2, "backward hooks");
    return call.at(0, PickledValue::Tensor);
  }
  if (name == kFromType) {  // (function, type, arguments, attributes)
    const std::string& type = call.at(1, PickledValue::Name).text;
    const std::string& function = call.at(0, PickledValue::Name).text;
    if (type != "torch.Tensor" && type != "torch.nn.parameter.Parameter") {
      call.refuse(fmt::format("makes a {}", type));
    }
    if (function != kTensor2 && function != kTensor3) call.refuse("calls " + function);
    return call_of(function, call.at(2, PickledValue::List).items, complain);
  }
  if (name == kOrderedDict) return dict_of(arguments, call);
  if (name == kCounter)
    return arguments.empty() ? PickledValue{.kind = PickledValue::Dict}
                             : call.at(0, PickledValue::Dict);
  if (name == kDevice) return device_of(arguments, call);
  if (name == kSize || is_in(kLists, name)) {
    const bool is_dict = !arguments.empty() && arguments[0]->kind == PickledValue::Dict;
    return call.at(0, is_dict ? PickledValue::Dict : PickledValue::List);
  }
  call.refuse("is not known");
}

PickledValue storage_of(const PickledValue& id, const Complain& complain) {
  const auto& parts = id.items;
  if (id.kind != PickledValue::List || parts.size() < 5 || parts[0]->text != "storage" ||
      parts[1]->kind != PickledValue::Name || parts[2]->kind != PickledValue::Text ||
      parts[4]->kind != PickledValue::Int || parts[4]->integer < 0) {
    complain("a persistent id is not ('storage', type, key, place, elements)");
  }
  const auto type = find(kStorages, parts[1]->text);
  if (type == std::end(kStorages)) {
    complain(fmt::format("{} is not a storage that is read", in_quotes(parts[1]->text)));
  }
  PickledValue value{.kind = PickledValue::Storage};
  auto& storage = value.tensor.emplace();
  storage.storage = parts[2]->text;
  storage.dtype = type->second;
  storage.storage_elements = parts[4]->integer;
  return value;
}

}  // namespace lockstep::checkpoint
