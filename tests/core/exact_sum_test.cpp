#include "lockstep/core/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

double sum(const std::vector<double>& values) {
  ExactSum all;
  for (const double value : values) all.add(value);
  return all.value();
}

using Limits = std::numeric_limits<double>;

TEST(ExactSum, RoundsOnce) {
  EXPECT_EQ(sum({}), 0);
  EXPECT_EQ(sum({1e100, 1, -1e100}), 1);
  EXPECT_EQ(sum({0.1, 0.2, 0.3, -0.6}), std::ldexp(1.0, -55));
  EXPECT_EQ(sum({1, 0x1p-53}), 1);                       // a tie, to even
  EXPECT_EQ(sum({1, 0x1p-53, 0x1p-1074}), 1 + 0x1p-52);  // just above it
  EXPECT_EQ(sum({1 + 0x1p-52, 0x1p-53}), 1 + 0x1p-51);
  EXPECT_EQ(sum({-1, -0x1p-53, -0x1p-1074}), -1 - 0x1p-52);
  EXPECT_EQ(sum({Limits::max(), Limits::max()}), Limits::infinity());
  EXPECT_EQ(sum({Limits::max(), Limits::max(), -Limits::max()}), Limits::max());
  EXPECT_EQ(sum({Limits::denorm_min(), Limits::denorm_min()}), 2 * Limits::denorm_min());
  EXPECT_EQ(sum({Limits::min(), -Limits::denorm_min()}), Limits::min() - Limits::denorm_min());
}

TEST(ExactSum, IsTheSameInAnyOrderAndDivision) {
  std::mt19937_64 engine(7);
  std::vector<double> values;
  for (int i = 0; i < 2000; ++i) {
    double value = 0;
    do {
      const uint64_t bits = engine();
      std::memcpy(&value, &bits, sizeof value);
    } while (!std::isfinite(value));
    values.push_back(value);
    if (i % 3 == 0) values.push_back(-value * (1 - 0x1p-53));
  }
  ExactSum all;
  for (const double value : values) all.add(value);
  for (int parts = 1; parts <= 7; ++parts) {
    std::shuffle(values.begin(), values.end(), engine);
    std::vector<ExactSum> sums(static_cast<size_t>(parts));
    for (size_t i = 0; i < values.size(); ++i) sums[i % sums.size()].add(values[i]);
    ExactSum::Digits digits{};
    for (ExactSum& part : sums) {
      for (size_t d = 0; d < digits.size(); ++d) digits[d] += part.digits()[d];
    }
    EXPECT_EQ(ExactSum(digits).digits(), all.digits());
    for (size_t i = 1; i < sums.size(); ++i) sums[0].add(sums[i]);
    EXPECT_EQ(sums[0].value(), all.value());
  }
}

TEST(ExactSum, OfSmallNumbersAsLongDoubles) {
  std::mt19937 engine(3);
  std::uniform_real_distribution<float> draw(-1, 1);
  for (int round = 0; round < 100; ++round) {
    ExactSum all;
    long double expected = 0;  // exact: 24 bits each, of similar size
    for (int i = 0; i < 100; ++i) {
      const float value = draw(engine);
      all.add(value);
      expected += value;
    }
    EXPECT_EQ(all.value(), static_cast<double>(expected));
  }
}

TEST(ExactSum, RefusesWhatIsNotFinite) {
  ExactSum all;
  all.add(2);
  EXPECT_THROW(all.add(Limits::quiet_NaN()), ConfigError);
  EXPECT_THROW(all.add(-Limits::infinity()), ConfigError);
  EXPECT_EQ(all.value(), 2);
}

}  // namespace
}  // namespace lockstep
