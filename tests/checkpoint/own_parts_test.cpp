// A table of the program's own whose rows are divided over the ranks, as the classes of a head.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/comm/world.h"
#include "lockstep/core/shard.h"
#include "support/folder.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

constexpr int64_t kRows = 3, kColumns = 2;

// This rank's rows of the whole: docs/resuming.md.
struct Rows : checkpoint::Stateful {
  explicit Rows(const World& world) {
    const Range range = Shard{world.rank(), world.size()}.of(kRows);
    begin = range.begin;
    mine = torch::zeros({range.end - range.begin, kColumns});
  }
  checkpoint::State state(const checkpoint::Names&) const override {
    return {.pieces = {{.name = "rows",
                        .dtype = mine.scalar_type(),
                        .sizes = {kRows, kColumns},
                        .parts = {{.box = {.offset = {begin, 0}, .size = {mine.size(0), kColumns}},
                                   .tensor = mine}},
                        .held = checkpoint::Held::InParts}}};
  }
  int64_t begin = 0;
  at::Tensor mine;
};

// Of 4 ranks one has no row.
TEST(OwnParts, AreRestoredOnAnyNumberOfRanks) {
  const at::Tensor whole = torch::arange(kRows * kColumns, at::kFloat).view({kRows, kColumns});
  const Folder folder;
  for (const int ranks : {3, 1, 2, 4}) {
    spawn(ranks, [&](World& world) {
      const auto rows = std::make_shared<Rows>(world);
      Checkpointer checkpoints(world, folder.path());
      checkpoints.track("head", rows);
      const auto found = checkpoints.restore_latest();
      ASSERT_EQ(found.has_value(), ranks != 3);
      const at::Tensor expected = whole.narrow(0, rows->begin, rows->mine.size(0));
      if (!found) rows->mine.copy_(expected);
      EXPECT_TRUE(torch::equal(rows->mine, expected));
      checkpoints.save(found ? found->step + 1 : 1);
    });
  }
}

}  // namespace
}  // namespace lockstep::test
