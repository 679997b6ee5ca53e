// The kernels of every instruction set give the bits of the definition.
#include "comm/reduce/reduce.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace lockstep::comm {
namespace {

using Kernel = decltype(&baseline::reduce);

std::vector<std::pair<const char*, Kernel>> kernels() {
  std::vector<std::pair<const char*, Kernel>> all = {{"baseline", &baseline::reduce},
                                                     {"chosen", &reduce}};
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
    all.emplace_back("avx2", &avx2::reduce);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    all.emplace_back("avx512", &avx512::reduce);
  }
#endif
  return all;
}

template <class T>
T tree(const std::vector<std::vector<T>>& parts, int begin, int end, size_t i) {
  if (end - begin == 1) return parts[begin][i];
  int left = 1;
  while (2 * left < end - begin) left *= 2;
  return tree(parts, begin, begin + left, i) + tree(parts, begin + left, end, i);
}

template <class T>
void check_tree(Element element) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal(0, 1000);
  for (const auto& [name, kernel] : kernels()) {
    for (int ranks : {1, 2, 3, 5, 8, 13}) {
      for (size_t count : {1u, 17u, 1024u, 5000u}) {
        std::vector<std::vector<T>> parts(ranks, std::vector<T>(count));
        for (auto& part : parts) {
          for (T& value : part) value = static_cast<T>(normal(random));
        }
        std::vector<T> expected(count);
        for (size_t i = 0; i < count; ++i)
          expected[i] = tree(parts, 0, ranks, i) / static_cast<T>(ranks);
        std::vector<void*> pointers;
        for (auto& part : parts) pointers.push_back(part.data());
        kernel({element, Combine::Sum, ranks}, pointers.data(), ranks, pointers.data(), ranks,
               static_cast<int64_t>(count));
        for (const auto& part : parts)
          EXPECT_EQ(part, expected) << name << ", " << ranks << " ranks, " << count;
      }
    }
  }
}

TEST(Reduce, SumsFloatsInTheTreeInPlace) { check_tree<float>(Element::Float32); }
TEST(Reduce, SumsDoublesInTheTreeInPlace) { check_tree<double>(Element::Float64); }

// Every 16-bit pattern plus zero: widening and rounding must give it back, on every instruction set
// alike.
TEST(Reduce, SixteenBitFloatsSurviveWidening) {
  for (const Element element : {Element::Float16, Element::BFloat16}) {
    std::vector<uint16_t> all(65536), zero(65536, 0);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    const uint16_t infinity = element == Element::Float16 ? 0x7c00 : 0x7f80;
    for (const auto& [name, kernel] : kernels()) {
      std::vector<uint16_t> sum(65536);
      const void* sources[] = {all.data(), zero.data()};
      void* target = sum.data();
      kernel({element, Combine::Sum}, sources, 2, &target, 1, 65536);
      for (size_t i = 0; i < all.size(); ++i) {
        const bool is_nan = (all[i] & 0x7fff) > infinity;
        if (is_nan) {
          ASSERT_GT(sum[i] & 0x7fff, infinity) << name << " " << i;
        } else if (all[i] != 0x8000) {  // -0 + 0 is 0
          ASSERT_EQ(sum[i], all[i]) << name;
        }
      }
    }
  }
}

TEST(Reduce, HalvesRoundToNearestEven) {
  for (const auto& [name, kernel] : kernels()) {
    // 2048 + 1 lies between 2048 and 2050: to even. 65504 + 16 rounds up to infinity. The smallest
    // subnormal doubles.
    const std::vector<uint16_t> a = {0x6800, 0x7bff, 0x0001}, b = {0x3c00, 0x4c00, 0x0001};
    std::vector<uint16_t> sum(3);
    const void* sources[] = {a.data(), b.data()};
    void* target = sum.data();
    kernel({Element::Float16, Combine::Sum}, sources, 2, &target, 1, 3);
    EXPECT_EQ(sum, (std::vector<uint16_t>{0x6800, 0x7c00, 0x0002})) << name;
  }
}

// In place, as the first of two. Fused operations would round less.
TEST(Reduce, ComplexProductsRoundAlikeEverywhere) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> a(2 * 1500), b(2 * 1500), expected(2 * 1500);
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = normal(random);
    b[i] = normal(random);
  }
  for (size_t i = 0; i < a.size(); i += 2) {
    volatile float same = a[i] * b[i], other = a[i + 1] * b[i + 1];
    volatile float left = a[i] * b[i + 1], right = a[i + 1] * b[i];
    expected[i] = same - other;
    expected[i + 1] = left + right;
  }
  for (const auto& [name, kernel] : kernels()) {
    std::vector<float> product = a;
    const void* sources[] = {product.data(), b.data()};
    void* target = product.data();
    kernel({Element::Complex64, Combine::Product}, sources, 2, &target, 1, 1500);
    EXPECT_EQ(product, expected) << name;
  }
}

// Every pattern plus zero gives itself back; sums above the largest number are the largest, or
// infinity.
TEST(Reduce, FloatsOfOneByteSurviveWideningAndEndAtTheirLargest) {
  for (const Element element : {Element::Float8E4M3, Element::Float8E5M2}) {
    const bool is_e5m2 = element == Element::Float8E5M2;
    std::vector<uint8_t> all(256), zero(256, 0), sum(256);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint8_t>(i);
    const uint8_t largest = is_e5m2 ? 0x7b : 0x7e, top = is_e5m2 ? 0x7c : 0x7e;
    for (const auto& [name, kernel] : kernels()) {
      const void* sources[] = {all.data(), zero.data()};
      void* target = sum.data();
      kernel({element, Combine::Sum}, sources, 2, &target, 1, 256);
      for (size_t i = 0; i < all.size(); ++i) {
        if ((all[i] & 0x7f) > top) {
          ASSERT_GT(sum[i] & 0x7f, top) << name << " " << i;
        } else if (all[i] != 0x80) {  // -0 + 0 is 0
          ASSERT_EQ(sum[i], all[i]) << name;
        }
      }
      const std::vector<uint8_t> most(3, largest);
      std::vector<uint8_t> twice(3);
      const void* two[] = {most.data(), most.data()};
      void* to = twice.data();
      kernel({element, Combine::Sum}, two, 2, &to, 1, 3);
      EXPECT_EQ(twice, std::vector<uint8_t>(3, top)) << name;
    }
  }
}

TEST(Reduce, WholeNumbersWrapAndTheirAverageTruncates) {
  for (const auto& [name, kernel] : kernels()) {
    std::vector<int8_t> a = {127, -7, 3}, b = {1, 0, -8};
    void* pointers[] = {a.data(), b.data()};
    kernel({Element::Int8, Combine::Sum}, pointers, 2, pointers, 2, 3);
    EXPECT_EQ(a, (std::vector<int8_t>{-128, -7, -5})) << name;
    std::vector<int64_t> c = {-7, 9}, d = {0, 0};
    void* longs[] = {c.data(), d.data()};
    kernel({Element::Int64, Combine::Sum, 2}, longs, 2, longs, 2, 2);
    EXPECT_EQ(d, (std::vector<int64_t>{-3, 4})) << name;
  }
}

}  // namespace
}  // namespace lockstep::comm
