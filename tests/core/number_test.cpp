#include "core/number.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clocale>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "support/folder.h"

namespace lockstep {
namespace {

void expect_round_trips() {
  using Numbers = std::numeric_limits<double>;
  for (const double value : {0.0, 0.1, 1.0 / 3, 1.5, 1e300, 123456789.0, Numbers::min(),
                             Numbers::max(), Numbers::denorm_min(), Numbers::infinity()}) {
    for (const double each : {value, -value}) {
      const std::string text = number_text(each);
      const auto found = number_from(text);
      ASSERT_TRUE(found) << text;
      EXPECT_EQ(*found, each) << text;
      EXPECT_EQ(std::signbit(*found), std::signbit(each)) << text;
      EXPECT_EQ(number_from(fmt::format("{}", each)), each);
    }
  }
  EXPECT_TRUE(std::isnan(number_from(number_text(Numbers::quiet_NaN())).value()));
  EXPECT_EQ(number_text(-12), "-0x1.8p+3");
  EXPECT_EQ(number_from("-0x1.8p+3"), -12);
  EXPECT_EQ(number_from("1e999"), Numbers::infinity());
  EXPECT_EQ(number_from("1e-999"), 0);
  for (const char* text : {"", " 1", "1 ", "1,5", "1.5x", "0x", "x", "-"}) {
    EXPECT_EQ(number_from(text), std::nullopt) << text;
  }
  EXPECT_EQ(number_from(std::string("1\0", 2)), std::nullopt);
}

TEST(Number, ComesBack) { expect_round_trips(); }

// As far as the machine can make such a locale.
TEST(Number, ComesBackWhereTheLocaleHasADecimalComma) {
  const test::Folder folder;
  const std::string make = fmt::format("localedef -i de_DE -f UTF-8 {} > {} 2>&1",
                                       folder / "de_DE.UTF-8", folder / "said");
  const int status = std::system(make.c_str());
  setenv("LOCPATH", folder.path().c_str(), 1);
  const bool has_comma = std::setlocale(LC_ALL, "de_DE.UTF-8") != nullptr;
  EXPECT_TRUE(has_comma || status != 0);
  EXPECT_EQ(std::strtod("1,5", nullptr), has_comma ? 1.5 : 1);
  expect_round_trips();
  std::setlocale(LC_ALL, "C");
  unsetenv("LOCPATH");
}

}  // namespace
}  // namespace lockstep
