#include "lockstep/core/environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

constexpr const char* kName = "LOCKSTEP_TEST_VARIABLE";

class EnvironmentTest : public ::testing::Test {
 protected:
  static void set(const char* value) { setenv(kName, value, 1); }
  ~EnvironmentTest() override { unsetenv(kName); }
};

TEST_F(EnvironmentTest, UnsetAndEmptyAreNothing) {
  EXPECT_EQ(env_text(kName), std::nullopt);
  EXPECT_EQ(env_int(kName, 0, 9), std::nullopt);
  set("");
  EXPECT_EQ(env_text(kName), std::nullopt);
  EXPECT_EQ(env_int(kName, 0, 9), std::nullopt);
}

TEST_F(EnvironmentTest, TextIsUnchanged) {
  set(" a b ");
  EXPECT_EQ(env_text(kName), " a b ");
}

TEST_F(EnvironmentTest, NumbersUpToTheirLimits) {
  set("-3");
  EXPECT_EQ(env_int(kName, -3, 9), -3);
  set("9223372036854775807");
  EXPECT_EQ(env_int(kName, 0, std::numeric_limits<int64_t>::max()),
            std::numeric_limits<int64_t>::max());
}

TEST_F(EnvironmentTest, WhatIsNoNumberInRangeIsRefused) {
  for (const char* text :
       {"10", "-1", "x", "1x", " 1", "1 ", "+1", "0x1", "1.0", "1e0", "9223372036854775808", "-"}) {
    set(text);
    EXPECT_THROW(env_int(kName, 0, 9), ConfigError) << text;
  }
}

TEST_F(EnvironmentTest, TheErrorNamesVariableValueAndRange) {
  set("two");
  try {
    env_int(kName, 1, 64);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "[environment] LOCKSTEP_TEST_VARIABLE='two' is not a whole number from 1 to 64");
  }
}

}  // namespace
}  // namespace lockstep
