// The tensors inside arguments and results of lockstep::call(). Private to the library.
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/OptionalArrayRef.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::parallel::detail {

using Tensors = std::vector<at::Tensor>;

// Which tensors a value holds.
enum class Holds { Nothing, Some, Unknown };

// Of a type that may be an argument or result of forward(): its tensors, and whether two values are
// the same ones (of tensors: the same tensor, not equal elements).
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
  static bool same(const T& a, const T& b) {
    if constexpr (std::equality_comparable<T>) return a == b;
    return false;
  }
};

template <>
struct Values<at::Tensor> {
  static constexpr Holds holds = Holds::Some;
  template <class Visit>
  static void visit(at::Tensor& tensor, const Visit& look) {
    look(tensor);
  }
  static bool same(const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); }
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
  static bool same(const std::optional<T>& a, const std::optional<T>& b) {
    return a && b ? Values<T>::same(*a, *b) : a.has_value() == b.has_value();
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
  static bool same(const std::vector<T>& a, const std::vector<T>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), &Values<T>::same);
  }
};

template <class T, size_t count>
struct Values<std::array<T, count>> {
  static constexpr Holds holds = Values<T>::holds;
  template <class Visit>
  static void visit(std::array<T, count>& values, const Visit& look) {
    for (auto& value : values) Values<T>::visit(value, look);
  }
  static bool same(const std::array<T, count>& a, const std::array<T, count>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), &Values<T>::same);
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
  static bool same(const std::pair<A, B>& a, const std::pair<A, B>& b) {
    return Values<A>::same(a.first, b.first) && Values<B>::same(a.second, b.second);
  }
};

template <class... T>
struct Values<std::tuple<T...>> {
  static constexpr Holds holds = most({Values<T>::holds...});
  template <class Visit>
  static void visit(std::tuple<T...>& values, const Visit& look) {
    std::apply([&](auto&... each) { (Values<T>::visit(each, look), ...); }, values);
  }
  static bool same(const std::tuple<T...>& a, const std::tuple<T...>& b) {
    return [&]<size_t... index>(std::index_sequence<index...>) {
      return (Values<T>::same(std::get<index>(a), std::get<index>(b)) && ...);
    }
    (std::index_sequence_for<T...>());
  }
};

// What a value leads to that is not copied with it.
template <class T>
struct Pointed {
  using Type = const void;
};
template <class T>
struct Pointed<T*> {
  using Type = T;
};
template <class T>
struct Pointed<std::reference_wrapper<T>> {
  using Type = T;
};
template <class T>
struct Pointed<std::shared_ptr<T>> {
  using Type = T;
};
template <class T, size_t extent>
struct Pointed<std::span<T, extent>> {
  using Type = T;
};

template <class T>
inline constexpr bool is_pointer = !std::is_same_v<typename Pointed<T>::Type, const void>;

// A module, or a pointer to one: part of a model, which lives as long as its graphs.
template <class T>
inline constexpr bool is_module =
    std::is_convertible_v<std::conditional_t<is_pointer<T>, typename Pointed<T>::Type, T>*,
                          const torch::nn::Module*>;

// Whether forward() may write to something of the caller by way of such a value.
template <class T>
inline constexpr bool leads_to_written =
    std::is_object_v<typename Pointed<T>::Type> && !std::is_const_v<typename Pointed<T>::Type> &&
    !is_module<T>;

// Whether a value may show what is gone when forward() runs again. Not text by const char*, which
// is a literal.
template <class T>
inline constexpr bool is_view = std::is_object_v<std::remove_pointer_t<T>>&& std::is_pointer_v<T> &&
                                !is_module<T> && !std::is_same_v<T, const char*>;
template <class T>
inline constexpr bool is_view<std::reference_wrapper<T>> = !is_module<T>;
template <class T, size_t extent>
inline constexpr bool is_view<std::span<T, extent>> = true;
template <>
inline constexpr bool is_view<std::string_view> = true;
template <class T>
inline constexpr bool is_view<std::initializer_list<T>> = true;
template <class T>
inline constexpr bool is_view<c10::ArrayRef<T>> = true;
template <class T>
inline constexpr bool is_view<c10::OptionalArrayRef<T>> = true;
template <class T>
inline constexpr bool is_view<c10::IListRef<T>> = true;
template <class T>
inline constexpr bool is_view<std::optional<T>> = is_view<T>;
template <class T>
inline constexpr bool is_view<std::vector<T>> = is_view<T>;
template <class T, size_t count>
inline constexpr bool is_view<std::array<T, count>> = is_view<T>;
template <class A, class B>
inline constexpr bool is_view<std::pair<A, B>> = is_view<A> || is_view<B>;
template <class... T>
inline constexpr bool is_view<std::tuple<T...>> = (is_view<T> || ...);

// What has the values of a view that it converts to.
template <class T>
struct Owned {
  using Type = T;
};
template <class T>
requires(!std::is_same_v<T, bool>) struct Owned<c10::ArrayRef<T>> {
  using Type = std::vector<T>;
  static Type of(c10::ArrayRef<T> view) { return view.vec(); }
};
template <class T>
struct Owned<std::span<const T>> {
  using Type = std::vector<T>;
  static Type of(std::span<const T> view) { return {view.begin(), view.end()}; }
};
template <>
struct Owned<std::string_view> {
  using Type = std::string;
  static Type of(std::string_view view) { return Type(view); }
};
template <class T>
requires(!std::is_same_v<typename Owned<T>::Type, T>) struct Owned<std::optional<T>> {
  using Type = std::optional<typename Owned<T>::Type>;
  static Type of(const std::optional<T>& view) {
    return view ? Type(Owned<T>::of(*view)) : std::nullopt;
  }
};

}  // namespace lockstep::parallel::detail
