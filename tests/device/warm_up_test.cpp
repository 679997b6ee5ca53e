// The tiny model on a device.
#include "lockstep/rl/warm_up.h"

#include <torch/torch.h>

#include "device/on_device.h"
#include "rl_policy/even_course.h"

namespace lockstep::test {
namespace {

TEST(WarmUpOnDevice, LeavesItsModelThereMadeOrCached) {
  const Folder folder;
  for (const bool cached : {false, true}) {
    spawn_on_device(2, [&](World& world) {
      const auto made = rl::warm_up(world, course().demonstrate, course().text, course().arenas,
                                    {.steps = 0, .lanes = 2, .corpus = 20, .cache = folder / "c"});
      EXPECT_EQ(made.cached, cached);
      for (const auto& parameter : made.net->parameters()) {
        EXPECT_EQ(parameter.device(), world.device());
      }
    });
  }
}

}  // namespace
}  // namespace lockstep::test
