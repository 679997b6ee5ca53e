#include "lockstep/parallel/deferred_init.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/StorageImpl.h>
#include <fmt/format.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "parallel/nn/deferred_init.h"

namespace lockstep::parallel {
namespace {

using c10::IValue;
using torch::jit::Stack;
constexpr auto kDeferred = c10::DispatchKey::DeferredInit;
constexpr size_t kLeastBytes = 4096;

// Where in a storage a tensor is.
struct Place {
  std::vector<int64_t> sizes, strides;
  int64_t offset;

  explicit Place(const at::Tensor& tensor)
      : sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        offset(tensor.storage_offset()) {}
  at::Tensor of(const at::Tensor& memory) const {
    return memory.as_strided(sizes, strides, offset);
  }
};

// One call that makes values. The tensor that it changes is not among its arguments, since that
// would own the recipe, which owns the call.
struct Step {
  c10::OperatorHandle op;
  std::vector<IValue> arguments;
  std::optional<Place> changes;  // none for the first, which makes the tensor
  at::Tensor generator;          // its state before, where the call draws numbers

  at::Tensor run(const at::Tensor& memory) const {
    if (generator.defined()) {
      auto now = at::globalContext().defaultGenerator(at::kCPU);
      const std::lock_guard lock(now.mutex());
      now.set_state(generator);
    }
    Stack stack(arguments.begin(), arguments.end());
    if (changes) stack.front() = changes->of(memory);
    op.callBoxed(&stack);
    return changes ? memory : stack.back().toTensor();
  }
};

// A storage without memory has it as the context of its DataPtr.
struct Recipe {
  at::ScalarType dtype;  // of what the first step makes
  std::vector<Step> steps;
  static void destroy(void* recipe) { delete static_cast<Recipe*>(recipe); }
};

// Puts the default generator's state back.
class GeneratorGuard {
 public:
  GeneratorGuard() : state_(state()) {}
  ~GeneratorGuard() {
    auto generator = at::globalContext().defaultGenerator(at::kCPU);
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state_);
  }
  GeneratorGuard(const GeneratorGuard&) = delete;
  GeneratorGuard& operator=(const GeneratorGuard&) = delete;
  static at::Tensor state() {
    auto generator = at::globalContext().defaultGenerator(at::kCPU);
    const std::lock_guard lock(generator.mutex());
    return generator.get_state();
  }

 private:
  at::Tensor state_;
};

c10::StorageImpl* storage_impl_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                  : nullptr;
}

Recipe* recipe_of(const at::Tensor& tensor) {
  c10::StorageImpl* storage = storage_impl_of(tensor);
  if (storage == nullptr) return nullptr;
  const c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &Recipe::destroy ? static_cast<Recipe*>(data.get_context())
                                                : nullptr;
}

void take_memory(const at::Tensor& tensor, Recipe recipe) {
  c10::StorageImpl* storage = storage_impl_of(tensor);
  storage->set_data_ptr_noswap(
      c10::DataPtr(nullptr, new Recipe(std::move(recipe)), &Recipe::destroy, tensor.device()));
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
      fmt::format("a tensor of {} elements was built under DeferredInit and has no memory yet: "
                  "attach its module to Fsdp or Ddp, or call materialize()",
                  tensor.numel()));
}

// The storage's memory, as what its first step has made.
at::Tensor storage_values(const Recipe& recipe) {
  const c10::impl::ExcludeDispatchKeyGuard plainly(kDeferred);
  const at::NoGradGuard no_grad;
  const GeneratorGuard generator;
  at::Tensor memory;
  for (const Step& step : recipe.steps) memory = step.run(memory);
  return memory;
}

template <class Look>
void for_each_tensor(const IValue* values, size_t count, const Look& look) {
  for (size_t i = 0; i < count; ++i) {
    if (values[i].isTensor()) look(values[i].toTensor());
    if (values[i].isTensorList()) {
      for (const at::Tensor& tensor : values[i].toTensorVector()) look(tensor);
    }
    if (values[i].isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : values[i].toOptionalTensorVector()) {
        if (tensor) look(*tensor);
      }
    }
  }
}

// What a call is given, and how it may be deferred.
struct Call {
  const c10::OperatorHandle& op;
  Stack& stack;
  size_t count, tensors = 0, deferred = 0;
  bool draws, own_generator = false;

  Call(const c10::OperatorHandle& o, Stack& s)
      : op(o),
        stack(s),
        count(o.schema().arguments().size()),
        draws(o.hasTag(at::Tag::nondeterministic_seeded)) {
    for_each_tensor(first(), count, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      ++tensors;
      if (is_deferred(tensor)) ++deferred;
    });
    for (size_t i = 0; i < count; ++i) {
      const std::string type = op.schema().arguments()[i].type()->str();
      if (type.find("Generator") == std::string::npos) continue;
      draws = true;
      own_generator = own_generator || !first()[i].isNone();
    }
  }

  const IValue* first() const { return &stack[stack.size() - count]; }
  bool makes_a_tensor() const {
    const auto& returns = op.schema().returns();
    return tensors == 0 && returns.size() == 1 && returns[0].alias_info() == nullptr &&
           returns[0].type()->isSubtypeOf(*c10::TensorType::get());
  }
  bool changes_one_in_place() const {
    const auto& schema = op.schema();
    if (tensors != 1 || deferred != 1 || !first()->isTensor()) return false;
    // As view_as_real(weight), whose place is counted in other elements.
    const at::Tensor self = first()->toTensor();
    if (self.scalar_type() != recipe_of(self)->dtype || self.is_conj() || self.is_neg()) {
      return false;
    }
    // Autograd would record or refuse it.
    if (first()->toTensor().requires_grad() && at::GradMode::is_enabled()) return false;
    return !op.hasTag(at::Tag::inplace_view) && schema.returns().size() == 1 &&
           schema.arguments()[0].alias_info() != nullptr &&
           schema.arguments()[0].alias_info()->isWrite();
  }
  bool makes_views() const {
    const auto& returns = op.schema().returns();
    return !returns.empty() && std::ranges::all_of(returns, [](const auto& result) {
      return result.alias_info() != nullptr && !result.alias_info()->isWrite();
    });
  }
  Step step() const {
    Step step{op, std::vector<IValue>(first(), first() + count), std::nullopt, {}};
    if (draws) step.generator = GeneratorGuard::state();
    return step;
  }
};

void make(const Call& call) {
  Step step = call.step();
  call.op.callBoxed(&call.stack);
  const at::Tensor made = call.stack.back().toTensor();
  const bool fits = made.is_cpu() && made.layout() == at::kStrided && !made.is_quantized() &&
                    made.nbytes() >= kLeastBytes && made.storage().use_count() == 1;
  if (!fits) return;
  // The default one may be another when the values are made.
  const auto& arguments = call.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "dtype") step.arguments[i] = made.scalar_type();
  }
  Recipe recipe{.dtype = made.scalar_type(), .steps = {}};
  recipe.steps.push_back(std::move(step));
  take_memory(made, std::move(recipe));
}

// A call that draws is made on other memory, so that the generator comes to where it would.
void change(const Call& call) {
  const at::Tensor self = call.first()->toTensor();
  Step step = call.step();
  step.arguments.front() = IValue();
  step.changes = Place(self);
  if (call.draws) {
    const auto bytes = static_cast<int64_t>(self.storage().nbytes());
    const int64_t elements = bytes / self.element_size();
    const at::NoGradGuard no_grad;
    call.stack[call.stack.size() - call.count] =
        step.changes->of(at::empty({elements}, self.options().requires_grad(false)));
    call.op.callBoxed(&call.stack);
    call.stack.pop_back();
  } else {
    call.stack.resize(call.stack.size() - call.count);
  }
  recipe_of(self)->steps.push_back(std::move(step));
  call.stack.emplace_back(self);
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    // Made of other calls, which come here again.
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kDeferred),
                       stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard plainly(kDeferred);
  const Call call(op, *stack);
  if (!call.own_generator && call.makes_a_tensor()) return make(call);
  if (!call.own_generator && call.changes_one_in_place()) return change(call);
  if (call.deferred > 0 && !call.makes_views() && !op.hasTag(at::Tag::inplace_view)) {
    for_each_tensor(call.first(), call.count,
                    [](const at::Tensor& tensor) { materialize(tensor); });
  }
  op.callBoxed(stack);
}

// The dispatcher keeps one for all of the process. volatile, since a pointer that is never read
// would be left out, and LeakSanitizer report what it pointed to.
c10::DispatchKey registered() {
  static const torch::Library* volatile library = [] {
    auto* made = new torch::Library(torch::Library::IMPL, "_", kDeferred, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
    return made;
  }();
  static_cast<void>(library);
  return kDeferred;
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
// A private flag, which an explicit instantiation may name.
template <bool c10::StorageImpl::*flag>
struct Throws {
  friend void set_throws(c10::StorageImpl& storage, bool throws) { storage.*flag = throws; }
};
void set_throws(c10::StorageImpl& storage, bool throws);
template struct Throws<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
#endif

}  // namespace

void allow_access(c10::StorageImpl& storage) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
  set_throws(storage, false);
  // Which looks at the flag again.
  c10::DataPtr memory = std::move(storage._mutable_data_ptr_no_checks());
  storage.set_data_ptr_noswap(std::move(memory));
#else
  storage.clear_data_ptr_access_error_msg_();
#endif
}

DeferredInit::DeferredInit() : guard_(registered()) {}

bool is_deferred(const at::Tensor& tensor) { return recipe_of(tensor) != nullptr; }

at::Tensor values_of(const at::Tensor& tensor) {
  const Recipe* recipe = recipe_of(tensor);
  if (recipe == nullptr) return tensor;
  const c10::impl::ExcludeDispatchKeyGuard plainly(kDeferred);
  return Place(tensor).of(storage_values(*recipe));
}

void materialize(const at::Tensor& tensor) {
  const Recipe* recipe = recipe_of(tensor);
  if (recipe == nullptr) return;
  const at::Tensor values = storage_values(*recipe);
  c10::StorageImpl* storage = storage_impl_of(tensor);
  storage->set_data_ptr_noswap(storage_impl_of(values)->set_data_ptr(c10::DataPtr()));
  allow_access(*storage);
}

void materialize(const ModuleRef& module) {
  for (const auto& [name, tensor] : module.parameters()) materialize(tensor);
  for (const auto& [name, tensor] : module.buffers()) materialize(tensor);
}

}  // namespace lockstep::parallel
