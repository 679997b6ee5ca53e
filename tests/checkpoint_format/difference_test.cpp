#include "lockstep/checkpoint/difference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "checkpoint_format/small_checkpoint.h"
#include "lockstep/checkpoint/error.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::difference;

// The number that bits of a dtype are: how far they are from a 64-bit zero.
template <class T>
double number(const char* dtype, T bits) {
  const std::vector<T> one{bits};
  const std::vector<double> zero{0};
  const auto found = difference(dtype, bytes_of(one), "F64", bytes_of(zero));
  return found.one_is_nan > 0 ? std::nan("") : found.largest;
}

TEST(Difference, ReadsEveryDtype) {
  EXPECT_EQ(number<uint16_t>("F16", 0x3c00), 1);
  EXPECT_EQ(number<uint16_t>("F16", 0x7bff), 65504);
  EXPECT_EQ(number<uint16_t>("F16", 0x0001), 0x1p-24);
  EXPECT_EQ(number<uint16_t>("F16", 0x7c00), std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(number<uint16_t>("F16", 0x7c01)));
  EXPECT_EQ(number<uint16_t>("BF16", 0xc040), 3);
  EXPECT_TRUE(std::isnan(number<uint16_t>("BF16", 0x7fc0)));
  EXPECT_EQ(number<uint8_t>("F8_E5M2", 0x7b), 57344);
  EXPECT_EQ(number<uint8_t>("F8_E4M3", 0x7e), 448);
  EXPECT_TRUE(std::isnan(number<uint8_t>("F8_E4M3", 0xff)));
  EXPECT_EQ(number<uint8_t>("F8_E4M3FNUZ", 0x7f), 240);
  EXPECT_TRUE(std::isnan(number<uint8_t>("F8_E5M2FNUZ", 0x80)));
  EXPECT_EQ(number<uint8_t>("F8_E5M2FNUZ", 0x7f), 57344);
  EXPECT_EQ(number<uint8_t>("F8_E8M0", 128), 2);
  EXPECT_EQ(number<int8_t>("I8", -5), 5);
  EXPECT_EQ(number<uint64_t>("U64", 1ull << 63), 0x1p63);
  EXPECT_EQ(number<uint8_t>("BOOL", 1), 1);
  EXPECT_THAT(message_of<CheckpointError>([] { number<uint8_t>("F7", 1); }),
              testing::HasSubstr("unknown dtype 'F7'"));
}

TEST(Difference, LargeIntegersAreExact) {
  const std::vector<int64_t> a{(int64_t{1} << 62) + 1}, b{int64_t{1} << 62};
  EXPECT_EQ(difference("I64", bytes_of(a), "I64", bytes_of(b)).differ, 1);
}

TEST(Difference, InfinitiesAreApartWhateverTheTolerance) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> a{kInfinity, kInfinity, -kInfinity}, b{kInfinity, 1, kInfinity};
  const auto found =
      difference("F32", bytes_of(a), "F32", bytes_of(b), {.absolute = 10, .relative = 1});
  EXPECT_EQ(found.differ, 2);
  EXPECT_EQ(found.largest, kInfinity);
}

}  // namespace
}  // namespace lockstep::test
