// Checkpoints of what is on devices.
#include <gtest/gtest.h>

#include "device/training.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "support/folder.h"

namespace lockstep::test {
namespace {

// What was there when save() was called, though the training has gone on before the file is
// written: whole, in parts of a tensor that ranks divide, not contiguous, complex, without
// elements.
TEST(CheckpointOnDevice, HasWhatWasThereWhenItWasSaved) {
  const Folder folder;
  on_both(2, [&](World& world) {
    for (const bool async : {false, true}) {
      const std::string path =
          folder / fmt::format("{}-{}", world.group().backend(), async ? "async" : "sync");
      std::vector<at::Tensor> here{at::arange(200'000).to(at::kFloat),
                                   at::arange(12).view({3, 4}),
                                   at::rand({5}).to(at::kBFloat16),
                                   at::full({1}, 3),
                                   at::zeros({0, 3}),
                                   at::complex(at::arange(6).to(at::kFloat), at::ones({6}))};
      here[2].fill_(0.25);
      std::vector<at::Tensor> there;
      for (const auto& tensor : here) there.push_back(tensor.to(world.device()));
      there[1] = there[1].t();
      there[3] = there[3].expand({1}).as_strided({1}, {6});
      Checkpointer checkpoints(world.group(), path, {.async = async});
      for (size_t i = 0; i < there.size(); ++i)
        checkpoints.track(fmt::format("tensor {}", i), there[i]);
      fake::shut_gate();
      checkpoints.save(1);
      for (const auto& tensor : there) tensor.zero_();
      checkpoints.finish();
      checkpoints.restore_latest();
      there[1] = there[1].t();
      for (size_t i = 0; i < there.size(); ++i)
        EXPECT_TRUE(at::equal(there[i].cpu(), here[i])) << i << (async ? ", async" : "");
      fake::open_gate();
    }
  });
}

}  // namespace
}  // namespace lockstep::test
