// Forward hooks for libtorch's modules, which have none: the model calls its layers through call(),
// and Fsdp or ActivationCheckpointing can act before and after a layer's forward().
//
//   for (auto& block : blocks) x = lockstep::call(block, x);     // in the model's forward()
//   auto y = lockstep::call(net, x);                             // in the training loop
//
// That is `block->forward(x)` unless something is attached to the layer: Fsdp, which gathers its
// parameters, or ActivationCheckpointing, which computes its activations twice instead of keeping
// them. So one model source runs plain, under Ddp, and under Fsdp.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/parallel/call_arguments.h"
#include "lockstep/parallel/call_values.h"

namespace lockstep::parallel {

// Runs around the forward() of a module that it is attached to. Private to the library.
class CallLayer {
 public:
  // The tensors among arguments or results, in order; undefined ones too.
  using Tensors = detail::Tensors;
  // The forward of the module, or of the next layer. It may be kept, and called again in backward.
  using Body = std::function<Tensors(const Tensors&)>;

  virtual ~CallLayer() = default;
  // Returns what body returns, or other tensors in the place of those.
  virtual Tensors call(const Tensors& inputs, const Body& body) = 0;
};

// Where a layer comes among those of one module: a smaller number is further outside. Private to
// the library.
enum class CallDepth : int { Shard, Recompute };

// Attaches a layer until it is destroyed. Private to the library.
class [[nodiscard]] CallAttachment {
 public:
  // Both outlive this.
  CallAttachment(const torch::nn::Module& module, CallLayer& layer, CallDepth depth);
  ~CallAttachment();
  CallAttachment(CallAttachment&& other) noexcept;
  CallAttachment& operator=(CallAttachment&&) = delete;

 private:
  const torch::nn::Module* module_;
  CallLayer* layer_;
};

namespace detail {

// Attachments of this process: while there is none a call costs one load.
extern std::atomic<int> attachment_count;
bool has_layers(const torch::nn::Module& module);
Tensors run_layers(const torch::nn::Module& module, const Tensors& inputs,
                   const CallLayer::Body& body);
[[noreturn]] void refuse_result(const torch::nn::Module& module, std::string_view type);
[[noreturn]] void refuse_written(const torch::nn::Module& module, std::string_view type);
[[noreturn]] void refuse_shared(const torch::nn::Module& module);
// The same of a forward() from one tensor to one.
at::Tensor run_layers_on(const torch::nn::Module& module, const at::Tensor& input,
                         const std::function<at::Tensor(const at::Tensor&)>& forward);
// Whether a module inside has layers, which the forward() of Sequential would not call.
bool has_layers_within(const torch::nn::SequentialImpl& sequential);
at::Tensor forward_chain(torch::nn::SequentialImpl& sequential, at::Tensor x);

// What one run of forward() left, as layers see it: each tensor that it made once.
class Outcome {
 public:
  explicit Outcome(Tensors given);

  void add_result(const at::Tensor& tensor);
  // Of an argument that was assigned to.
  void add_written(const at::Tensor& tensor);
  // The given tensors that were changed in place.
  void add_changed();
  const Tensors& outputs() const { return outputs_; }

  // `outputs` take the place of outputs(), and `inputs` that of the given tensors, which may be
  // copies of another dtype: what was changed in those is copied back.
  void finish(const Tensors& outputs, const Tensors& inputs);
  // After finish(): each tensor of results and written arguments, in the order of the calls.
  const at::Tensor& next() { return tensors_.at(next_++); }

 private:
  struct Before {
    int64_t version = 0;
    std::shared_ptr<const void> node = nullptr;  // of autograd
  };
  enum class Among { Nothing, Given, Outputs };
  struct Place {
    Among list = Among::Nothing;
    size_t index = 0;
  };
  struct Changed {
    size_t given, output;
    bool in_graph;
  };
  static Before state_of(const at::Tensor& tensor);
  std::optional<size_t> given(const at::Tensor& tensor) const;
  size_t output(const at::Tensor& tensor);

  Tensors given_, outputs_, tensors_;
  std::vector<Before> before_;
  std::vector<Place> places_;
  std::vector<Changed> changed_;
  size_t next_ = 0;
};

template <std::derived_from<torch::nn::Module> M>
M& module_of(M& module) {
  return module;
}
template <std::derived_from<torch::nn::Module> M>
M& module_of(const std::shared_ptr<M>& module) {
  return *module;
}
template <class Contained>
Contained& module_of(const torch::nn::ModuleHolder<Contained>& holder) {
  return *holder.ptr();
}

using Owner = std::shared_ptr<const torch::nn::Module>;

// Nothing of a module that no std::shared_ptr holds, or whose class has an enable_shared_from_this
// of its own beside that of Module: C++ sets neither.
inline Owner owner_of(const torch::nn::Module& module) { return module.weak_from_this().lock(); }
template <std::derived_from<torch::nn::Module> M>
Owner owner_of(const std::shared_ptr<M>& module) {
  return module;
}
template <class Contained>
Owner owner_of(const torch::nn::ModuleHolder<Contained>& holder) {
  return holder.ptr();
}

// One run of forward() on arguments of these types.
template <class Module, class Indices, class... Args>
class Run;
template <class Module, size_t... index, class... Args>
class Run<Module, std::index_sequence<index...>, Args...> {
 public:
  using Result = std::decay_t<decltype(std::declval<Module&>().forward(std::declval<Args>()...))>;
  using Arguments = std::tuple<Kept<Module, index, Args>...>;

  // `kept` has the tensors of `given`, and is not changed.
  Run(Module& module, Arguments& kept, const Tensors& given)
      : outcome_(given),
        written_(copy<index>(kept)...),
        result_(std::make_unique<Made>([&]() -> Value {
          if constexpr (std::is_void_v<Result>) {
            module.forward(argument<index>(kept)...);
            return {};
          } else {
            return module.forward(argument<index>(kept)...);
          }
        })) {
    Values<Value>::visit(result_->value, [&](const at::Tensor& y) { outcome_.add_result(y); });
    (note_written<index>(kept), ...);
    outcome_.add_changed();
  }

  // What layers see of it.
  const Tensors& outputs() const { return outcome_.outputs(); }

  // Gives the caller's objects what forward() left in its arguments. `outputs` came from the layers
  // in the place of outputs(), and `inputs` are the caller's tensors.
  void finish(const Module& module, const Tensors& outputs, const Tensors& inputs, Args&... args) {
    outcome_.finish(outputs, inputs);
    const auto put = [&](at::Tensor& tensor) { tensor = outcome_.next(); };
    Values<Value>::visit(result_->value, put);
    const std::array<const void*, sizeof...(Args)> places{address<index>(args)...};
    (write<index>(module, args, places, put), ...);
  }

  // After finish().
  Result take() {
    if constexpr (!std::is_void_v<Result>) return std::move(result_->value);
  }

 private:
  template <size_t i>
  using Argument = std::tuple_element_t<i, std::tuple<Args...>>;
  template <size_t i>
  static constexpr bool is_copied =
      may_write<Module, i, Argument<i>>&& Values<std::decay_t<Argument<i>>>::holds !=
      Holds::Unknown;
  template <size_t i>
  using Written = std::conditional_t<is_copied<i>, std::decay_t<Argument<i>>, std::monostate>;
  using Value = std::conditional_t<std::is_void_v<Result>, std::monostate, Result>;
  // Made in place, and never moved within.
  struct Made {
    explicit Made(const auto& make) : value(make()) {}
    Value value;
  };

  template <size_t i>
  static Written<i> copy(Arguments& kept) {
    if constexpr (is_copied<i>) {
      return std::get<i>(kept);
    } else {
      return {};
    }
  }
  template <size_t i>
  auto& argument(Arguments& kept) {
    if constexpr (is_copied<i>) {
      return std::get<i>(written_);
    } else {
      return std::get<i>(kept);
    }
  }
  template <size_t i>
  void note_written(const Arguments& kept) {
    if constexpr (is_copied<i>) {
      using All = Values<Written<i>>;
      is_changed_[i] = !All::same(std::get<i>(kept), std::get<i>(written_));
      if (!is_changed_[i]) return;
      All::visit(std::get<i>(written_), [&](const at::Tensor& x) { outcome_.add_written(x); });
    }
  }
  // Of an object that forward() sees change, nothing of another.
  template <size_t i, class T>
  static const void* address(const T& object) {
    constexpr bool is_seen =
        std::is_lvalue_reference_v<Argument<i>> && access_of<Module, i>() != Access::Value;
    return is_seen ? static_cast<const void*>(std::addressof(object)) : nullptr;
  }
  template <size_t i, class T>
  void write(const Module& module, T& object,
             const std::array<const void*, sizeof...(Args)>& places, const auto& put) {
    if constexpr (is_copied<i>) {
      if (!is_changed_[i]) return;
      if (std::count(places.begin(), places.end(), places[i]) > 1) refuse_shared(module);
      Values<Written<i>>::visit(std::get<i>(written_), put);
      if constexpr (std::is_copy_assignable_v<Written<i>>) {
        object = std::get<i>(written_);  // no move, which would give a vector other memory
      } else {
        refuse_written(module, typeid(T).name());
      }
    }
  }

  Outcome outcome_;
  std::tuple<Written<index>...> written_;
  std::array<bool, sizeof...(Args)> is_changed_{};
  std::unique_ptr<Made> result_;
};

template <class Module, class... Args>
auto call_with_layers(Module& module, const Owner& owner, Args&&... args) {
  using Indices = std::index_sequence_for<Args...>;
  using ThisRun = Run<Module, Indices, Args...>;
  const auto kept = [&]<size_t... index>(std::index_sequence<index...>) {
    (refuse_unseen<Module, index, Args>(module, args), ...);
    return std::make_shared<typename ThisRun::Arguments>(
        keep<Kept<Module, index, Args>>(std::forward<Args>(args))...);
  }
  (Indices());
  const Tensors inputs = tensors_of(*kept);
  // Only the call itself needs more than the tensors.
  const auto first = std::make_shared<std::optional<ThisRun>>();
  const Tensors outputs = run_layers(
      module, inputs, [&module, owner, kept, slot = std::weak_ptr(first)](const Tensors& given) {
        replace(*kept, given);
        ThisRun run(module, *kept, given);
        // What it was given may belong to a graph, which holds this in turn.
        replace(*kept, Tensors(given.size()));
        Tensors all = run.outputs();
        if (const auto call = slot.lock()) call->emplace(std::move(run));
        return all;
      });
  (*first)->finish(module, outputs, inputs, args...);
  return (*first)->take();
}

}  // namespace detail

// module.forward(args...), with what is attached to the module. The module may also be given as a
// std::shared_ptr of it, or as what TORCH_MODULE makes. A torch::nn::Sequential that is given one
// tensor calls its modules in the same way.
//
// What is attached sees the tensors among arguments and results, within std::optional, vector,
// array, pair and tuple too. A variable of these types that forward() takes by non-const reference
// has afterwards what forward() left in it, as without call(): other tensors, or more or fewer of
// them; they count as results. It is unchanged where forward() throws. ConfigError where it is
// given twice, because forward() would work on two copies. Changes in place are made to the
// caller's tensors, too; those by data() leave no trace, and are lost where Fsdp's param_dtype
// makes copies of another dtype. Other objects are handed through: by reference where forward() may
// write to them (a cache, for instance) and where they cannot be copied or have virtual functions,
// and as copies where not; a c10::ArrayRef, a std::span of const and a std::string_view as copies
// of what they show. Tensors that forward() puts into such an object are not seen. A result of
// another type may hold tensors that cannot be found in it, so that a module with something
// attached throws ConfigError for it.
template <class Module, class... Args>
auto call(Module&& module, Args&&... args) {
  auto& target = detail::module_of(module);
  using Target = std::remove_reference_t<decltype(target)>;
  const bool attached = detail::attachment_count.load(std::memory_order_acquire) > 0;
  if constexpr (std::is_same_v<std::remove_const_t<Target>, torch::nn::SequentialImpl> &&
                !std::is_const_v<Target> && sizeof...(Args) == 1 &&
                (std::is_same_v<std::decay_t<Args>, at::Tensor> && ...)) {
    if (!attached) return target.forward(std::forward<Args>(args)...);
    const auto chain = [&target](const at::Tensor& input) {
      return detail::has_layers_within(target) ? detail::forward_chain(target, input)
                                               : target.forward(input);
    };
    return detail::run_layers_on(target, args..., chain);
  } else {
    using Result = std::decay_t<decltype(target.forward(std::forward<Args>(args)...))>;
    if constexpr (std::is_void_v<Result>) {
      if (!attached || !detail::has_layers(target)) {
        target.forward(std::forward<Args>(args)...);
      } else {
        detail::call_with_layers(target, detail::owner_of(module), std::forward<Args>(args)...);
      }
    } else {
      if (!attached || !detail::has_layers(target)) {
        return Result(target.forward(std::forward<Args>(args)...));
      }
      if constexpr (detail::Values<Result>::holds == detail::Holds::Unknown) {
        detail::refuse_result(target, typeid(Result).name());
      } else {
        return Result(detail::call_with_layers(target, detail::owner_of(module),
                                               std::forward<Args>(args)...));
      }
    }
  }
}

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::call;
}  // namespace lockstep
