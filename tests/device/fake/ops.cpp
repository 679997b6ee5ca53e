// libtorch's operators on the fake device: the CPU's kernels over the same memory, in the order of
// the streams. Those that write to memory they are given run in the stream, later; the others,
// whose results have sizes that only they know, run at once, after what is in the stream.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <deque>

#include "device/fake/device.h"
#include "device/fake/streams.h"

namespace lockstep::test::fake {
namespace {

using torch::jit::Stack;

constexpr auto kType = c10::DeviceType::PrivateUse1;

// Memory goes back in the order of the stream that it was taken on, as a GPU's allocator has it,
// and is overwritten then: who uses it on another stream without keeping it, or telling the
// allocator, sees that.
struct Block {
  void* data;
  size_t bytes;
  FakeStream* stream;
};

std::atomic<int64_t> in_use{0};

struct FakeAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, current_stream().device_index());
    if (bytes == 0) return {nullptr, device};
    auto* block = new Block{c10::alloc_cpu(bytes), bytes, &FakeStream::current()};
    in_use += static_cast<int64_t>(bytes);
    return {block->data, block, &release, device};
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    if (const auto recording = block->stream->recording()) {
      // A graph keeps its memory.
      const std::lock_guard lock(recording->mutex);
      recording->memory.emplace_back(context, &release);
      return;
    }
    block->stream->push([block, uses = take_uses(block->data)] {
      for (const auto& [stream, number] : uses) {
        if (stream != block->stream) stream->finish(number);
      }
      in_use -= static_cast<int64_t>(block->bytes);
      std::memset(block->data, 0xee, block->bytes);
      static thread_local std::deque<std::pair<void*, size_t>>
          aside;  // not to be had again for a while
      static thread_local size_t bytes = 0;
      aside.emplace_back(block->data, block->bytes);
      for (bytes += block->bytes; bytes > (size_t{64} << 20) && aside.size() > 1;
           aside.pop_front()) {
        bytes -= aside.front().second;
        c10::free_cpu(aside.front().first);
      }
      delete block;
    });
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

FakeAllocator allocator;
REGISTER_ALLOCATOR(kType, &allocator)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

const bool installed = [] {
  c10::register_privateuse1_backend("fake");
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

// The same memory as a tensor of the other device.
at::Tensor alias(const at::Tensor& tensor, c10::Device device) {
  auto* owner = new c10::Storage(tensor.storage());
  c10::DataPtr data(
      owner->mutable_data(), owner, [](void* own) { delete static_cast<c10::Storage*>(own); },
      device);
  c10::Allocator* from = device.is_cpu() ? c10::GetCPUAllocator() : &allocator;
  c10::Storage storage(c10::Storage::use_byte_size_t(), owner->nbytes(), std::move(data), from,
                       /*resizable=*/true);
  const c10::DispatchKeySet keys(device.is_cpu() ? c10::DispatchKey::CPU
                                                 : c10::DispatchKey::PrivateUse1);
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                      tensor.storage_offset());
  return result;
}

// The tensors of a call, here and as the CPU's kernel sees them.
class Pairs {
 public:
  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kType) return tensor;
    for (const auto& [mine, theirs] : pairs_) {
      if (mine.is_same(tensor)) return theirs;
    }
    pairs_.emplace_back(tensor, alias(tensor, at::kCPU));
    return pairs_.back().second;
  }
  at::Tensor back(const at::Tensor& tensor) const {
    if (!tensor.defined()) return tensor;
    for (const auto& [mine, theirs] : pairs_) {
      if (theirs.is_same(tensor)) return mine;
    }
    return alias(tensor, current_stream().device());
  }
  // Gives results that a kernel has resized their new memory.
  void follow() const {
    for (const auto& [mine, theirs] : pairs_) {
      if (mine.sizes() == theirs.sizes() && mine.const_data_ptr() == theirs.const_data_ptr())
        continue;
      c10::TensorImpl* impl = mine.unsafeGetTensorImpl();
      impl->set_storage_keep_dtype(alias(theirs, mine.device()).storage());
      impl->set_sizes_and_strides(theirs.sizes(), theirs.strides(), theirs.storage_offset());
    }
  }
  bool resized() const {
    for (const auto& [mine, theirs] : pairs_) {
      if (mine.sizes() != theirs.sizes()) return true;
    }
    return false;
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

template <class Convert>
c10::IValue converted(const c10::IValue& value, const Convert& convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional(convert(*tensor)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(at::kCPU);
  return value;
}

// Whether all that the operator gives back is what it was given to write to.
bool writes_only(const c10::FunctionSchema& schema) {
  bool writes = false;
  for (const auto& argument : schema.arguments())
    writes = writes || (argument.alias_info() && argument.alias_info()->isWrite());
  for (const auto& result : schema.returns()) {
    if (result.alias_info() == nullptr || !result.alias_info()->isWrite()) return false;
  }
  return writes;
}

// Whether the operator is given an empty tensor to write to, which it makes as large as it needs.
bool fills_empty(const c10::FunctionSchema& schema, const Stack& stack) {
  const size_t count = schema.arguments().size();
  for (size_t i = 0; i < count; ++i) {
    const auto* info = schema.arguments()[i].alias_info();
    const auto& value = torch::jit::peek(stack, i, count);
    if (info && info->isWrite() && value.isTensor() && value.toTensor().numel() == 0) return true;
  }
  return false;
}

void call_cpu(const c10::OperatorHandle& op, Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  auto pairs = std::make_shared<Pairs>();
  auto arguments = std::make_shared<Stack>();
  for (const auto& value : torch::jit::last(*stack, count)) {
    arguments->push_back(
        converted(value, [&](const at::Tensor& tensor) { return pairs->to_cpu(tensor); }));
  }
  if (writes_only(schema) && !fills_empty(schema, *stack)) {
    Stack results;
    for (const auto& result : schema.returns()) {
      for (size_t i = 0; i < count; ++i) {
        const auto* info = schema.arguments()[i].alias_info();
        if (info && *info == *result.alias_info())
          results.push_back(torch::jit::peek(*stack, i, count));
      }
    }
    TORCH_CHECK(results.size() == schema.returns().size(), "fake device: results of ",
                schema.name());
    torch::jit::drop(*stack, count);
    for (auto& result : results) stack->push_back(result);
    FakeStream::current().push([op, arguments, pairs] {
      Stack own = *arguments;  // a graph runs it again
      call_cpu(op, &own);
      TORCH_CHECK(!pairs->resized(), "fake device: ", op.schema().name(),
                  " resized what it was given");
    });
    return;
  }
  FakeStream::current().finish_all();
  call_cpu(op, arguments.get());
  pairs->follow();
  torch::jit::drop(*stack, count);
  for (const auto& value : *arguments) {
    stack->push_back(
        converted(value, [&](const at::Tensor& tensor) { return pairs->back(tensor); }));
  }
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::kFloat));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  // Their memory as it is now: a tensor may be given other memory before the stream comes to this.
  Pairs pairs;
  FakeStream& stream = FakeStream::current();
  const uint64_t number = stream.push([to = pairs.to_cpu(to), from = pairs.to_cpu(from)] {
    const at::NoGradGuard no_grad;
    to.copy_(from);
  });
  // The host's memory may change as soon as the call returns, and is read then.
  if (!non_blocking && (from.is_cpu() || to.is_cpu())) stream.finish(number);
  return to;
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::IntArrayRef sizes,
                         c10::IntArrayRef strides) {
  return at::native::as_strided_tensorimpl(tensor, sizes, strides, tensor.storage_offset());
}

// libtorch would not let a parameter move from the CPU to a device that it does not know.
bool any_type(const at::Tensor&, const at::Tensor&) { return true; }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &any_type);
}

}  // namespace

int64_t memory_in_use() {
  for (c10::DeviceIndex index = 0; index < 8; ++index) {
    c10::impl::VirtualGuardImpl(kType).synchronizeDevice(index);
  }
  return in_use;
}

}  // namespace lockstep::test::fake
