// What is restored in several threads, and tensors of every kind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <string>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::verify;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// Enough bytes for several threads: tensors of some 1 MB, each with other numbers, and a larger
// one.
struct Wide : torch::nn::Module {
  explicit Wide(int64_t first) {
    for (int64_t i = 0; i < 24; ++i) {
      const int64_t rows = i == 7 ? 3000 : 500 + i;
      auto numbers = torch::arange(rows * 500, torch::kFloat).add_(first * (i + 1));
      numbers = i % 3 == 1 ? numbers.view({500, rows}).t() : numbers.view({rows, 500});
      register_buffer("wide" + std::to_string(i), numbers);
    }
  }
};

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto bytes = [](const at::Tensor& tensor) {
    const at::Tensor plain = tensor.contiguous();
    return std::string(static_cast<const char*>(plain.const_data_ptr()), plain.nbytes());
  };
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() && bytes(a) == bytes(b);
}

void expect_same(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto others = b.named_buffers();
  for (const auto& item : a.named_buffers()) {
    EXPECT_TRUE(same_bits(item.value(), others[item.key()])) << item.key();
  }
}

class RestoreThreads : public testing::TestWithParam<std::pair<int, int>> {};

INSTANTIATE_TEST_SUITE_P(, RestoreThreads,
                         testing::Values(std::pair(1, 1), std::pair(2, 1), std::pair(1, 2),
                                         std::pair(3, 2)),
                         [](const auto& test) {
                           return "From" + std::to_string(test.param.first) + "To" +
                                  std::to_string(test.param.second);
                         });

TEST_P(RestoreThreads, GiveTheBitsOrChangeNothing) {
  const Folder folder;
  spawn(GetParam().first, [&](World& world) {
    Wide net(1);
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("net", net);
    checkpoints.save(1);
  });
  const auto restore = [&](World& world, Wide& net) {
    // One rank has 4 threads, if there are as many cores, and two have 4 by this.
    setenv("LOCAL_WORLD_SIZE", "1", 1);
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("net", net);
    checkpoints.restore_latest();
  };
  spawn(GetParam().second, [&](World& world) {
    Wide net(0);
    restore(world, net);
    expect_same(net, Wide(1));
  });
  // The last byte of the last file.
  const std::string file = folder / ("step-00000001/shard-" + std::to_string(GetParam().first - 1) +
                                     "-of-" + std::to_string(GetParam().first) + ".safetensors");
  std::string bytes = contents(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 4);
  write(file, bytes);
  spawn(GetParam().second, [&](World& world) {
    Wide net(0);
    EXPECT_THAT(message_of<CheckpointError>([&] { restore(world, net); }),
                AllOf(HasSubstr(file), HasSubstr("net/wide"), HasSubstr("is damaged")));
    expect_same(net, Wide(0));
  });
}

// Each kind of tensor, with memory of every layout.
struct Kinds : torch::nn::Module {
  explicit Kinds(int64_t from) {
    for (const auto dtype :
         {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kFloat8_e4m3fn,
          torch::kFloat8_e5m2, torch::kBool, torch::kByte, torch::kChar, torch::kShort, torch::kInt,
          torch::kLong, torch::kUInt16, torch::kUInt32, torch::kUInt64, torch::kComplexFloat,
          torch::kComplexDouble}) {
      const auto name = std::string(c10::toString(dtype));
      // Fresh memory each: permutations and slices of bytes, so that each kind has any bits.
      const auto numbers = [&](at::IntArrayRef sizes) {
        int64_t count = static_cast<int64_t>(c10::elementSize(dtype));
        for (const int64_t size : sizes) count *= size;
        const int64_t values = dtype == torch::kBool ? 2 : 101;
        return torch::arange(count)
            .add(from)
            .remainder(values)
            .to(torch::kByte)
            .view(dtype)
            .view(sizes);
      };
      register_buffer(name + "_plain", numbers({3, 4, 5}));
      register_buffer(name + "_number", numbers({1}).view({}));
      register_buffer(name + "_nothing", numbers({2, 0, 3}));
      register_buffer(name + "_turned", numbers({4, 6}).t());
      register_buffer(name + "_every_second", numbers({6, 4}).slice(0, 0, 6, 2).slice(1, 1, 4, 2));
      register_buffer(name + "_channels_last", numbers({2, 3, 2, 2}).permute({0, 3, 1, 2}));
    }
  }
};

TEST(RestoreKinds, OnOtherNumbersOfRanks) {
  for (const auto& [saved, restored] : {std::pair(1, 2), std::pair(3, 1)}) {
    const Folder folder;
    spawn(saved, [&](World& world) {
      Kinds net(1);
      Checkpointer checkpoints(world, folder.path());
      checkpoints.track("net", net);
      checkpoints.save(1);
    });
    EXPECT_THAT(verify(folder / "step-00000001"), ElementsAre());
    spawn(restored, [&](World& world) {
      Kinds net(0);
      Checkpointer checkpoints(world, folder.path());
      checkpoints.track("net", net);
      checkpoints.restore_latest();
      expect_same(net, Kinds(1));
    });
  }
}

}  // namespace
}  // namespace lockstep::test
