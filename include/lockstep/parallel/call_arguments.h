// How lockstep::call() keeps arguments for a forward() that runs again in backward. Private to the
// library.
#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "lockstep/parallel/call_values.h"

namespace lockstep::parallel::detail {

// Whether a layer runs forward() a second time, in backward.
bool is_recomputed(const torch::nn::Module& module);
[[noreturn]] void refuse_second_run(const torch::nn::Module& module, std::string_view type);
[[noreturn]] void refuse_kept(const torch::nn::Module& module, std::string_view type);

// The parameters of a forward() that is neither overloaded nor a template.
template <class Forward>
struct Parameters {
  using Types = void;
};
template <class Result, class M, class... P>
struct Parameters<Result (M::*)(P...)> {
  using Types = std::tuple<P...>;
};
template <class Result, class M, class... P>
struct Parameters<Result (M::*)(P...) const> : Parameters<Result (M::*)(P...)> {};
template <class Result, class M, class... P>
struct Parameters<Result (M::*)(P...) noexcept> : Parameters<Result (M::*)(P...)> {};
template <class Result, class M, class... P>
struct Parameters<Result (M::*)(P...) const noexcept> : Parameters<Result (M::*)(P...)> {};

enum class Access { Value, Read, Write };

// What forward() may do with an object of the caller: everything, where its parameters are unknown.
template <class Module, size_t index>
constexpr Access access_of() {
  if constexpr (requires { &Module::forward; }) {
    using Types = typename Parameters<decltype(&Module::forward)>::Types;
    if constexpr (!std::is_void_v<Types>) {
      using Type = std::tuple_element_t<index, Types>;
      if constexpr (!std::is_lvalue_reference_v<Type>) return Access::Value;
      if constexpr (std::is_const_v<std::remove_reference_t<Type>>) return Access::Read;
    }
  }
  return Access::Write;
}

template <class Module, size_t index, class Argument>
inline constexpr bool may_write =
    std::is_lvalue_reference_v<Argument> && !std::is_const_v<std::remove_reference_t<Argument>> &&
    access_of<Module, index>() == Access::Write;

// A class whose members have no copy says so by deleting its own copy constructor.
template <class T>
constexpr bool has_copy() {
  if constexpr (requires { typename T::value_type; }) {
    if constexpr (!std::is_same_v<typename T::value_type, T>) {
      if (!has_copy<typename T::value_type>()) return false;
    }
  }
  return std::is_copy_constructible_v<T>;
}

// Whether a copy is the same to forward(): one of a part of an object is not.
template <class T>
constexpr bool is_copyable() {
  return has_copy<T>() && !std::is_polymorphic_v<T>;
}

// By value: what the caller does with its own object then, or where that ends, is nothing to a
// second run. By reference only what forward() may write to (a cache), or what has no copy.
template <class Module, size_t index, class Argument>
constexpr auto kept() {
  using T = std::decay_t<Argument>;
  constexpr bool is_known = Values<T>::holds != Holds::Unknown;
  if constexpr (!std::is_same_v<typename Owned<T>::Type, T> &&
                access_of<Module, index>() != Access::Write) {
    return std::type_identity<typename Owned<T>::Type>();
  } else if constexpr (std::is_lvalue_reference_v<Argument> && !is_known &&
                       (!is_copyable<T>() || may_write<Module, index, Argument>)) {
    return std::type_identity<Argument>();
  } else {
    return std::type_identity<T>();
  }
}
template <class Module, size_t index, class Argument>
using Kept = typename decltype(kept<Module, index, Argument>())::type;

template <class Kept, class Argument>
decltype(auto) keep(Argument&& argument) {
  using T = std::decay_t<Argument>;
  if constexpr (std::is_same_v<Kept, T> || std::is_reference_v<Kept>) {
    return std::forward<Argument>(argument);
  } else {
    return Owned<T>::of(argument);
  }
}

template <class Argument>
void visit_kept(std::remove_reference_t<Argument>& value, auto&& look) {
  if constexpr (Values<std::decay_t<Argument>>::holds != Holds::Unknown) {
    Values<std::decay_t<Argument>>::visit(value, look);
  }
}

template <class... Kept>
Tensors tensors_of(std::tuple<Kept...>& values) {
  Tensors all;
  const auto add = [&](const at::Tensor& tensor) { all.push_back(tensor); };
  std::apply([&](auto&... each) { (visit_kept<Kept>(each, add), ...); }, values);
  return all;
}

template <class... Kept>
void replace(std::tuple<Kept...>& values, const Tensors& tensors) {
  size_t next = 0;
  const auto put = [&](at::Tensor& tensor) { tensor = tensors.at(next++); };
  std::apply([&](auto&... each) { (visit_kept<Kept>(each, put), ...); }, values);
}

// A second run would write to the object again, or find it gone.
template <class Module, size_t index, class Argument>
void refuse_unseen(const Module& module, const std::remove_reference_t<Argument>& argument) {
  using T = std::decay_t<Argument>;
  using AsKept = Kept<Module, index, Argument>;
  constexpr bool is_written =
      leads_to_written<T> ||
      (Values<T>::holds == Holds::Unknown && !is_pointer<T> && may_write<Module, index, Argument>);
  constexpr bool is_lost =
      is_view<std::decay_t<AsKept>> || (std::is_reference_v<AsKept> && !is_module<T>);
  if constexpr (is_written || is_lost) {
    if constexpr (is_pointer<T> && requires(const T given) { given == nullptr; }) {
      const T given = argument;
      if (given == nullptr) return;
    }
    if (!is_recomputed(module)) return;
    if constexpr (is_written) refuse_second_run(module, typeid(T).name());
    refuse_kept(module, typeid(T).name());
  }
}

}  // namespace lockstep::parallel::detail
