// A loop over batches that threads make, in a child by fork(), which has none of these threads.
#include "support/fork.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <optional>

#include "lockstep/core/error.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::data {
namespace {

using test::in_a_child;
using test::isolated;
using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

const auto names_fork =
    AllOf(HasSubstr("[loader] the loop over this epoch belongs to process"), HasSubstr("fork()"));

class LoaderInAChild : public testing::Test {
 protected:
  Loader loader(int64_t lanes = 0) const {
    return Loader(TensorDataset(at::arange(100), at::ones({100})), Shard{0, 1},
                  {.batch_size = 2, .shuffle = false, .workers = 2, .lanes = lanes});
  }
};

TEST_F(LoaderInAChild, IsDestroyedWithoutItsThreads) {
  isolated([this] {
    auto batches = loader();
    std::optional<Loader::Epoch> epoch(batches.epoch(0));
    auto at = epoch->begin();
    auto lanes = loader(2);
    std::optional<Steps> steps(lanes.steps(0));
    (void)steps->begin();
    in_a_child([&] {
      epoch.reset();
      steps.reset();
    });
    ++at;
    EXPECT_EQ((*at).data[0].item<int64_t>(), 2);
  });
}

TEST_F(LoaderInAChild, IsRefusedAndAnEpochOfTheChildsOwnGoesOn) {
  isolated([this] {
    auto batches = loader();
    auto epoch = batches.epoch(0);
    auto at = epoch.begin();
    in_a_child([&] {
      EXPECT_THAT(message_of<ConfigError>([&] { ++at; }), names_fork);
      // As docs/faq.md says: two threads at once must not find libtorch's pool of the parent.
      at::set_num_threads(1);
      int64_t sum = 0;
      for (const auto& [x, y] : batches.epoch(1)) sum += x.sum().item<int64_t>();
      EXPECT_EQ(sum, 99 * 100 / 2);
    });
  });
}

}  // namespace
}  // namespace lockstep::data
