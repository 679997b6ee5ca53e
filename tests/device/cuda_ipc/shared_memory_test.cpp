// Collectives of memory that all ranks of a host map, which Group::empty() gives: without copies
// into the transport's own, and the same bits as over shared memory of the CPU.
#include <gmock/gmock.h>

#include <fstream>

#include "device/alike.h"
#include "device/cuda_ipc/on_ipc.h"
#include "lockstep/core/error.h"

namespace lockstep::test {
namespace {

using comm::Group;
using comm::ReduceOp;

constexpr int64_t kCount = 300'001;  // more than goes at once

// Whether the bytes of `tensor` are in a mapping of the fake driver's.
bool is_shared(const at::Tensor& tensor) {
  std::ifstream maps("/proc/self/maps");
  const auto address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  for (std::string line; std::getline(maps, line);) {
    if (line.find("fake-cuda") == line.npos) continue;
    const uintptr_t begin = std::stoull(line, nullptr, 16),
                    end = std::stoull(line.substr(line.find('-') + 1), nullptr, 16);
    if (begin <= address && address < end) return true;
  }
  return false;
}

int64_t mappings() {
  std::ifstream maps("/proc/self/maps");
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("fake-cuda") != line.npos) ++count;
  }
  return count;
}

at::Tensor random(int64_t count, int seed, at::ScalarType dtype = at::kFloat) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  return at::randn({count}, generator).to(dtype);
}

// `call(tensors)` on copies of `inputs` on the CPU, and on `places` of the device, which get the
// same numbers: the same bits.
void expect_same(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& places,
                 const std::function<void(const std::vector<at::Tensor>&)>& call,
                 const std::string& what) {
  std::vector<at::Tensor> here;
  for (size_t i = 0; i < inputs.size(); ++i) {
    here.push_back(inputs[i].clone());
    places[i].copy_(inputs[i]);
  }
  call(here);
  call(places);
  for (size_t i = 0; i < inputs.size(); ++i)
    EXPECT_TRUE(at::equal(places[i].cpu(), here[i])) << what << ", tensor " << i;
}

class CudaIpcShared : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    setenv("FAKE_CUDA_MPS", "1", 1);
    setenv("FAKE_DEVICES", "1", 1);
  }
  void TearDown() override {
    unsetenv("FAKE_CUDA_MPS");
    unsetenv("FAKE_DEVICES");
  }
  // Once as it comes, once with nothing over before it is waited for.
  static void run(const std::function<void(World&)>& body) {
    spawn_on_ipc(GetParam(), [&](World& world) {
      body(world);
      fake::shut_gate();
      body(world);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, CudaIpcShared, testing::Values(2, 3));

TEST_P(CudaIpcShared, SumsHaveTheBitsOfTheCpu) {
  run([](World& world) {
    const Group& group = world.group();
    for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      const at::Tensor memory =
          group.empty({kCount + 64}, at::TensorOptions(world.device()).dtype(dtype));
      EXPECT_TRUE(is_shared(memory));
      EXPECT_EQ(memory.cpu().count_nonzero().item<int64_t>(), 0);
      // The second begins at no whole packet, and goes through stages.
      for (const int64_t skipped : {0, 3, 16}) {
        for (ReduceOp op : {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Max}) {
          expect_same(
              {random(kCount, world.rank(), dtype)}, {memory.narrow(0, skipped, kCount)},
              [&](auto& t) { group.all_reduce(t[0], op).wait(); },
              fmt::format("{} from {}", c10::toString(dtype), skipped));
        }
      }
    }
  });
}

TEST_P(CudaIpcShared, GathersAndScatters) {
  run([](World& world) {
    const Group& group = world.group();
    const int n = world.size();
    for (const int64_t part : {100'000, 100'003}) {
      const at::Tensor whole = group.empty({n * part}, world.device()),
                       own = at::zeros({part}, world.device());
      for (ReduceOp op : {ReduceOp::Sum, ReduceOp::Average}) {
        expect_same(
            {at::zeros({part}), random(n * part, world.rank())}, {own, whole},
            [&](auto& t) { group.reduce_scatter(t[0], t[1], op).wait(); }, "reduce_scatter");
      }
      expect_same(
          {at::zeros({n * part}), random(part, world.rank())}, {whole, own},
          [&](auto& t) { group.all_gather(t[0], t[1]).wait(); }, "all_gather");
      // In place.
      expect_same(
          {random(n * part, world.rank())}, {whole},
          [&](auto& t) {
            const at::Tensor mine = t[0].narrow(0, world.rank() * part, part);
            group.all_gather(t[0], mine).wait();
            group.reduce_scatter(mine, t[0]).wait();
          },
          "in place");
    }
  });
}

// Ranks need not have it in the same memory, or at the same place.
TEST_P(CudaIpcShared, WhereRanksDifferTheyCopy) {
  run([](World& world) {
    const Group& group = world.group();
    const int n = world.size(), rank = world.rank();
    // More than one round.
    constexpr int64_t kMany = 5'000'003;
    const at::Tensor first = group.empty({kMany + 8}, world.device()),
                     second = group.empty({kMany}, world.device()),
                     ordinary = at::zeros({kMany}, world.device());
    const std::vector<at::Tensor> differ{rank == 0 ? ordinary : second,
                                         first.narrow(0, 4 * (rank % 2), kMany),
                                         rank == n - 1 ? first.narrow(0, 0, kMany) : second};
    for (size_t i = 0; i < differ.size(); ++i) {
      expect_same(
          {random(kMany, rank)}, {differ[i]}, [&](auto& t) { group.all_reduce(t[0]).wait(); },
          fmt::format("case {}", i));
      const int64_t part = kMany / n;
      expect_same(
          {at::zeros({part * n}), random(part, rank)},
          {differ[i].narrow(0, 0, part * n), at::zeros({part}, world.device())},
          [&](auto& t) { group.all_gather(t[0], t[1]).wait(); }, fmt::format("case {}", i));
      // Between those, some that all have in one place.
      expect_same(
          {random(kMany, rank)}, {second}, [&](auto& t) { group.all_reduce(t[0]).wait(); },
          "in one place");
    }
  });
}

TEST_P(CudaIpcShared, MemoryGoesWithTheTensorOnEachRank) {
  spawn_on_ipc(GetParam(), [](World& world) {
    const int64_t before = mappings();
    at::Tensor memory = world.group().empty({kCount}, world.device());
    EXPECT_EQ(mappings(), before + world.size());
    memory.fill_(world.rank() + 1);
    world.group().all_reduce(memory).wait();
    const float sum = memory.cpu()[kCount - 1].item<float>();
    EXPECT_EQ(sum, world.size() * (world.size() + 1) / 2.0f);
    memory.reset();
    // A group lets go of what a call used when the next one comes.
    world.group().all_reduce(at::zeros({4}).to(world.device())).wait();
    EXPECT_EQ(mappings(), before);
    // A group goes, although its last call used such memory, which outlives it.
    memory = world.group().empty({kCount}, world.device());
    world.group().all_reduce(memory).wait();
    (void)memory.cpu();
    memory.reset();
    world = World::solo();
    EXPECT_EQ(mappings(), 0);
  });
  spawn_on_ipc(GetParam(), [](World& world) {
    at::Tensor memory;
    memory = world.group().empty({kCount}, world.device());
    world = World::solo();
    EXPECT_EQ(memory.cpu().sum().item<float>(), 0);
  });
}

TEST_P(CudaIpcShared, WithoutMemoryToShareAllHaveOrdinaryMemory) {
  spawn_on_ipc(GetParam(), [](World& world) {
    if (world.rank() == 1) setenv("FAKE_CUDA_MOST", "1000000", 1);
    const int64_t before = mappings();
    const at::Tensor memory = world.group().empty({kCount}, world.device());
    EXPECT_FALSE(is_shared(memory));
    EXPECT_EQ(mappings(), before);
    memory.fill_(1);
    world.group().all_reduce(memory).wait();
    EXPECT_EQ(memory.cpu().min().item<float>(), world.size());
  });
}

TEST_P(CudaIpcShared, DifferentCallsAreQuotedAllTheSame) {
  spawn_on_ipc(GetParam(), [](World& world) {
    const at::Tensor memory = world.group().empty({kCount}, world.device());
    const std::string said = message_of([&] {
      world.group().all_reduce(memory.narrow(0, 0, kCount - world.rank())).wait();
      (void)memory.cpu();
      world.group().barrier().wait();
    });
    EXPECT_THAT(said, testing::AllOf(testing::HasSubstr("float32 x 300001"),
                                     testing::HasSubstr("float32 x 300000")));
  });
}

}  // namespace
}  // namespace lockstep::test
