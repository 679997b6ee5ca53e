// The tensors inside arguments and results of lockstep::call(). Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

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

// Whether forward() may write to tensors, or numbers, of the caller by way of such a value.
template <class T>
constexpr bool leads_to_tensors() {
  using Type = typename Pointed<T>::Type;
  if constexpr (std::is_object_v<Type> && !std::is_const_v<Type>) {
    return Values<Type>::holds != Holds::Unknown;
  } else {
    return false;
  }
}

}  // namespace lockstep::parallel::detail
