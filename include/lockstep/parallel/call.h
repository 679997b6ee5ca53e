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
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace lockstep::parallel {

// Runs around the forward() of a module that it is attached to. Private to the library.
class CallLayer {
 public:
  // The tensors among arguments or results, in order; undefined ones too.
  using Tensors = std::vector<at::Tensor>;
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

using Tensors = CallLayer::Tensors;

// Attachments of this process: while there is none a call costs one load.
extern std::atomic<int> attachment_count;
bool has_layers(const torch::nn::Module& module);
Tensors run_layers(const torch::nn::Module& module, const Tensors& inputs,
                   const CallLayer::Body& body);
[[noreturn]] void refuse_result(const torch::nn::Module& module, std::string_view type);
// Whether a module inside has layers, which the forward() of Sequential would not call.
bool has_layers_within(const torch::nn::SequentialImpl& sequential);
at::Tensor forward_chain(torch::nn::SequentialImpl& sequential, at::Tensor x);

// Which tensors a value holds.
enum class Holds { Nothing, Some, Unknown };

template <class T>
struct Values {
  static constexpr Holds holds =
      std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_same_v<T, std::string> ||
              std::is_same_v<T, std::string_view> || std::is_same_v<T, std::nullptr_t> ||
              std::is_same_v<T, std::nullopt_t>
          ? Holds::Nothing
          : Holds::Unknown;
  template <class Visit>
  static void visit(T&, const Visit&) {}
};

template <>
struct Values<at::Tensor> {
  static constexpr Holds holds = Holds::Some;
  template <class Visit>
  static void visit(at::Tensor& tensor, const Visit& look) {
    look(tensor);
  }
};

constexpr Holds most(std::initializer_list<Holds> all) {
  Holds found = Holds::Nothing;
  for (const Holds each : all) found = std::max(found, each);
  return found;
}

template <class T>
struct Values<std::optional<T>> {
  static constexpr Holds holds = Values<T>::holds;
  template <class Visit>
  static void visit(std::optional<T>& value, const Visit& look) {
    if (value) Values<T>::visit(*value, look);
  }
};

template <class T>
struct Values<std::vector<T>> {
  static constexpr Holds holds = Values<T>::holds;
  template <class Visit>
  static void visit(std::vector<T>& values, const Visit& look) {
    if constexpr (holds == Holds::Some) {
      for (auto& value : values) Values<T>::visit(value, look);
    }
  }
};

template <class T, size_t count>
struct Values<std::array<T, count>> {
  static constexpr Holds holds = Values<T>::holds;
  template <class Visit>
  static void visit(std::array<T, count>& values, const Visit& look) {
    for (auto& value : values) Values<T>::visit(value, look);
  }
};

template <class A, class B>
struct Values<std::pair<A, B>> {
  static constexpr Holds holds = most({Values<A>::holds, Values<B>::holds});
  template <class Visit>
  static void visit(std::pair<A, B>& values, const Visit& look) {
    Values<A>::visit(values.first, look);
    Values<B>::visit(values.second, look);
  }
};

template <class... T>
struct Values<std::tuple<T...>> {
  static constexpr Holds holds = most({Values<T>::holds...});
  template <class Visit>
  static void visit(std::tuple<T...>& values, const Visit& look) {
    std::apply([&](auto&... each) { (Values<T>::visit(each, look), ...); }, values);
  }
};

// How an argument is kept for a forward that may run again: a value, or a reference to what the
// caller shares with the layer, such as a cache.
template <class Argument>
using Kept = std::conditional_t<Values<std::decay_t<Argument>>::holds == Holds::Unknown &&
                                    (!std::is_copy_constructible_v<std::decay_t<Argument>> ||
                                     (std::is_lvalue_reference_v<Argument> &&
                                      !std::is_const_v<std::remove_reference_t<Argument>>)),
                                std::remove_reference_t<Argument>&, std::decay_t<Argument>>;

template <class Value>
void visit_kept(std::remove_reference_t<Value>& value, auto&& look) {
  if constexpr (Values<std::decay_t<Value>>::holds != Holds::Unknown) {
    Values<std::decay_t<Value>>::visit(value, look);
  }
}

template <class... Values>
Tensors tensors_of(std::tuple<Values...>& values) {
  Tensors all;
  const auto add = [&](const at::Tensor& tensor) { all.push_back(tensor); };
  std::apply([&](auto&... each) { (visit_kept<Values>(each, add), ...); }, values);
  return all;
}

template <class... Values>
void replace(std::tuple<Values...>& values, const Tensors& tensors) {
  size_t next = 0;
  const auto put = [&](at::Tensor& tensor) { tensor = tensors.at(next++); };
  std::apply([&](auto&... each) { (visit_kept<Values>(each, put), ...); }, values);
}

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

template <class Module, class... Args>
auto call_with_layers(Module& module, Args&&... args) {
  using Result = std::decay_t<decltype(module.forward(std::forward<Args>(args)...))>;
  // References stay valid: a layer that runs the body later is given only what is copied.
  auto kept = std::make_shared<std::tuple<Kept<Args>...>>(std::forward<Args>(args)...);
  const Tensors inputs = tensors_of(*kept);
  const auto owner = module.weak_from_this().lock();
  if constexpr (std::is_void_v<Result>) {
    run_layers(module, inputs, [&module, owner, kept](const Tensors& tensors) {
      replace(*kept, tensors);
      std::apply([&](auto&... each) { module.forward(each...); }, *kept);
      replace(*kept, Tensors(tensors.size()));
      return Tensors();
    });
  } else {
    // Made in place, and never moved within.
    struct Made {
      explicit Made(const std::function<Result()>& make) : value(make()) {}
      Result value;
    };
    using Slot = std::shared_ptr<Made>;
    const auto result = std::make_shared<Slot>();
    const Tensors outputs = run_layers(
        module, inputs,
        [&module, owner, kept, slot = std::weak_ptr<Slot>(result)](const Tensors& tensors) {
          replace(*kept, tensors);
          const auto made = std::make_shared<Made>([&]() -> Result {
            return std::apply([&](auto&... each) -> Result { return module.forward(each...); },
                              *kept);
          });
          // What it was given may belong to a graph, which holds this in turn.
          replace(*kept, Tensors(tensors.size()));
          Tensors all;
          Values<Result>::visit(made->value,
                                [&](const at::Tensor& tensor) { all.push_back(tensor); });
          // Only the call itself needs more than the tensors.
          if (const auto first = slot.lock()) *first = made;
          return all;
        });
    size_t next = 0;
    Values<Result>::visit((*result)->value,
                          [&](at::Tensor& tensor) { tensor = outputs.at(next++); });
    return std::move((*result)->value);
  }
}

}  // namespace detail

// module.forward(args...), with what is attached to the module. The module may also be given as a
// std::shared_ptr of it, or as what TORCH_MODULE makes. A torch::nn::Sequential that is given one
// tensor calls its modules in the same way.
//
// What is attached sees the tensors among arguments and results, within std::optional, vector,
// array, pair and tuple too. Other objects are handed through: copied where they are const or
// temporary, and by reference where they are not (a cache, for instance). A result of another type
// may hold tensors that cannot be found in it, so that a module with something attached throws
// ConfigError for it.
template <class Module, class... Args>
auto call(Module&& module, Args&&... args) {
  auto& target = detail::module_of(module);
  using Target = std::remove_reference_t<decltype(target)>;
  const bool attached = detail::attachment_count.load(std::memory_order_acquire) > 0;
  if constexpr (std::is_same_v<std::remove_const_t<Target>, torch::nn::SequentialImpl> &&
                !std::is_const_v<Target> && sizeof...(Args) == 1 &&
                (std::is_same_v<std::decay_t<Args>, at::Tensor> && ...)) {
    if (!attached) return target.forward(std::forward<Args>(args)...);
    const CallLayer::Body chain = [&target](const CallLayer::Tensors& inputs) {
      return CallLayer::Tensors{detail::has_layers_within(target)
                                    ? detail::forward_chain(target, inputs[0])
                                    : target.forward(inputs[0])};
    };
    return detail::run_layers(target, {std::forward<Args>(args)...}, chain)[0];
  } else {
    using Result = std::decay_t<decltype(target.forward(std::forward<Args>(args)...))>;
    if constexpr (std::is_void_v<Result>) {
      if (!attached || !detail::has_layers(target)) {
        target.forward(std::forward<Args>(args)...);
      } else {
        detail::call_with_layers(target, std::forward<Args>(args)...);
      }
    } else {
      if (!attached || !detail::has_layers(target)) {
        return Result(target.forward(std::forward<Args>(args)...));
      }
      if constexpr (detail::Values<Result>::holds == detail::Holds::Unknown) {
        detail::refuse_result(target, typeid(Result).name());
      } else {
        return Result(detail::call_with_layers(target, std::forward<Args>(args)...));
      }
    }
  }
}

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::call;
}  // namespace lockstep
