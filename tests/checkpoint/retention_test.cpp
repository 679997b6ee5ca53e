// Older checkpoints are removed when a newer one is there, and only then.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

#include "lockstep/checkpoint/checkpointer.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Once it is told to, gives a name to a tensor that it does not save.
struct Misnamed : checkpoint::Stateful {
  checkpoint::State state(const checkpoint::Names&) const override {
    checkpoint::State state{.pieces = {checkpoint::whole_piece("a", torch::ones({2}))}};
    if (is_wrong) state.aliases["b"] = "c";
    return state;
  }
  bool is_wrong = false;
};

TEST(Keeping, WhatCannotBeReadRemovesNothing) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const auto object = std::make_shared<Misnamed>();
    Checkpointer checkpoints(world, folder.path(), {.retention = {.keep_last = 1}});
    checkpoints.track("object", object);
    checkpoints.save(1);
    object->is_wrong = true;
    EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.save(2); }),
                AllOf(HasSubstr("step 2"), HasSubstr("object/b")));
  });
  const auto listing = checkpoint::list_checkpoints(folder.path());
  ASSERT_EQ(listing.checkpoints.size(), 1);
  EXPECT_EQ(listing.checkpoints[0].step, 1);
  EXPECT_THAT(listing.unreadable, testing::IsEmpty());
}

}  // namespace
}  // namespace lockstep::test
