// What variables say, and addresses and sizes that only a rank would find wrong.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cstdlib>
#include <string>

#include "lockstep/train/config.h"
#include "train_config/read.h"

namespace lockstep::train {
namespace {

using testing::HasSubstr;

TEST(LoadConfig, WhatRanksWouldRefuseOfVariablesIsRefused) {
  const auto refused = [](const char* name, const char* value, const std::string& why) {
    setenv(name, value, 1);
    const std::string text = refusal("");
    unsetenv(name);
    EXPECT_THAT(text, HasSubstr(fmt::format("environment {}={}: {}: '{}' is {}", name, value, name,
                                            value, why)));
  };
  for (const char* value : {"2", "true", "yes"}) {
    refused("LOCKSTEP_TLS", value, "neither 0 nor 1");
  }
  for (const char* value : {"1.5", "1e2", "ten"}) {
    refused("LOCKSTEP_TIMEOUT", value, "not a whole number of seconds");
  }
  refused("ACCELERATE_USE_FSDP", "maybe", "neither true nor false");
  refused("ACCELERATE_USE_CPU", "2", "neither true nor false");
}

TEST(LoadConfig, AcceleratesVariablesAreReadInItsWords) {
  const auto with = [](const char* name, const char* value) {
    setenv(name, value, 1);
    const auto config = read("");
    unsetenv(name);
    return config.parallel;
  };
  for (const char* yes : {"1", "TRUE", "t", "yes", "Y", "on"}) {
    EXPECT_EQ(with("ACCELERATE_USE_FSDP", yes).strategy, "fsdp") << yes;
    EXPECT_EQ(with("ACCELERATE_USE_CPU", yes).device, "cpu") << yes;
  }
  for (const char* no : {"", "0", "FALSE", "f", "no", "N", "off"}) {
    EXPECT_EQ(with("ACCELERATE_USE_FSDP", no).strategy, "ddp") << no;
    EXPECT_EQ(with("ACCELERATE_USE_CPU", no).device, "auto") << no;
  }
}

TEST(LoadConfig, OneValueIsTheSameHoweverItIsWritten) {
  EXPECT_EQ(read("epochs: 3\nnum_train_epochs: 3.0").training.epochs, 3);
  EXPECT_EQ(read("lr: 1e-3\noptimizer: {learning_rate: 0.001}").optimizer.learning_rate, 1e-3);
  EXPECT_EQ(read("metrics: mse\ntraining: {metrics: [mse]}").training.metrics.size(), 1u);
  EXPECT_THAT(refusal("epochs: 3\nnum_train_epochs: 4"), HasSubstr("says something else"));
  EXPECT_THAT(refusal("epochs: 3\nnum_train_epochs: x"), HasSubstr("says something else"));
  setenv("LOCKSTEP_TLS", "1", 1);
  setenv("LOCKSTEP_TIMEOUT", "30", 1);
  EXPECT_TRUE(read("", {"parallel.tls=yes", "parallel.timeout_seconds=30.0"}).parallel.tls);
  EXPECT_THAT(refusal("", {"parallel.tls=no"}), HasSubstr("contradicts the environment"));
  unsetenv("LOCKSTEP_TLS");
  unsetenv("LOCKSTEP_TIMEOUT");
}

TEST(LoadConfig, AnAddressAndASizeOfBucketsThatCannotBeAreRefused) {
  for (const std::string address : {":0", "127.0.0.1:99999", "a:b", "[::1"}) {
    EXPECT_THAT(refusal("logging: {prometheus_address: '" + address + "'}"),
                HasSubstr("logging.prometheus_address: '" + address + "': give HOST or HOST:PORT"));
  }
  for (const std::string address : {"127.0.0.1:0", "host", "[::1]:9464"}) {
    EXPECT_EQ(read("logging: {prometheus_address: '" + address + "'}").logging.prometheus_address,
              address);
  }
  for (const char* megabytes : {"1e300", "1e-300"}) {
    EXPECT_THAT(refusal(fmt::format("bucket_cap_mb: {}", megabytes)),
                HasSubstr("bucket_cap_mb: '" + std::string(megabytes) +
                          "' is not a number from 0.001 to 1000000"));
  }
}

}  // namespace
}  // namespace lockstep::train
