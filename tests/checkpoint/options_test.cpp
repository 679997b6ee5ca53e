// What a Checkpointer is told when it is made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/core/error.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::CheckpointerOptions;
using checkpoint::Retention;
using testing::HasSubstr;

// Elsewhere -1 keeps all; here it removed each checkpoint as soon as it was published.
TEST(CheckpointerOptions, ThatMakeNoSenseAreRefused) {
  isolated([] {
    const Folder folder;
    const auto told = [&](CheckpointerOptions options) {
      return message_of<ConfigError>(
          [&] { Checkpointer(World::solo(), folder.path(), std::move(options)); });
    };
    EXPECT_THAT(told({.retention = {.keep_last = -1}}),
                HasSubstr("[checkpoint] Retention::keep_last = -1: give 0, which keeps all"));
    EXPECT_THAT(told({.retention = {.keep_every = -5}}), HasSubstr("keep_every = -5"));
    EXPECT_THAT(told({.retention = {.best = Retention::Best{"loss", 0}}}), HasSubstr("keep = 0"));
    EXPECT_THAT(told({.retention = {.best = Retention::Best{""}}}), HasSubstr("has no metric"));
    EXPECT_THAT(told({.timeout = std::chrono::milliseconds(0)}), HasSubstr("timeout = 0"));
    EXPECT_EQ(told({}), "nothing");
  });
}

}  // namespace
}  // namespace lockstep::test
