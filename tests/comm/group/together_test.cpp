// Steps that fail on one rank alone.
#include "comm/together.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

TEST(Together, WhatWasThrownHereOutweighsALostGroup) {
  spawn(2, [](World& world) {
    world.group().abort("the job is over");
    EXPECT_EQ(message_of<std::runtime_error>([&] {
                comm::together(world.group(), "step",
                               [] { throw std::range_error("no optimizer"); });
              }),
              "no optimizer");
  });
}

}  // namespace
}  // namespace lockstep::test
