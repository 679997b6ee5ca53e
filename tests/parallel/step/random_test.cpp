// Random numbers belong to (seed, step, lane), not to a rank; and what a run's header says is
// pinned.
#include "lockstep/parallel/random.h"

#include <ATen/Context.h>

#include <cfenv>
#include <cstdlib>

#include "lockstep/core/shard.h"
#include "lockstep/parallel/determinism.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;

// Computed by an independent implementation in Python integers.
TEST(StreamSeed, IsTheDocumentedMixture) {
  EXPECT_EQ(stream_seed({}), 0x238275bc38fcbe91U);
  EXPECT_EQ(stream_seed({.seed = 1}), 0xb18a02f46d8d86c3U);
  EXPECT_EQ(stream_seed({.step = 1}), 0x44e5b98100c67fb0U);
  EXPECT_EQ(stream_seed({.lane = 1}), 0x2f32a78496c67c60U);
  EXPECT_EQ(stream_seed({.seed = 42, .step = 1000, .lane = 7}), 0xa3415f0ac4f3c5b0U);
}

TEST(SeedEverything, RepeatsTensorsAndCsOwn) {
  isolated([] {
    const auto draw = [] { return std::pair(at::randn({8}), std::rand()); };
    seed_everything(5);
    const auto first = draw();
    const auto more = draw();
    seed_everything(5);
    const auto again = draw();
    EXPECT_TRUE(at::equal(first.first, again.first) && first.second == again.second);
    EXPECT_FALSE(at::equal(first.first, more.first));
  });
}

TEST(SeedEverything, RanksBuildTheSameModuleAndThenDrawTheirOwn) {
  spawn(3, [](World& world) {
    const auto said_by_ddp = [&](auto seed) {
      seed();
      torch::nn::Linear net(6, 4);
      const at::Tensor weight = net->weight.detach().clone();
      at::Tensor all = at::empty({3, 4, 6});
      world.group().all_gather(all, weight).wait();
      ::testing::internal::CaptureStderr();
      Ddp ddp(*net, world.group());
      const std::string said = ::testing::internal::GetCapturedStderr();
      EXPECT_TRUE(at::equal(net->weight, all[0]));
      if (world.rank() == 0) {
        EXPECT_EQ(at::equal(all[1], all[0]), said.empty()) << said;
      }
      return said;
    };
    EXPECT_EQ(said_by_ddp([] { seed_everything(7); }), "");
    EXPECT_EQ(said_by_ddp([&] {
                seed_everything(7 + world.rank());
              }).find("rank 1 begins with other parameters") != std::string::npos,
              world.rank() == 0);
    EXPECT_EQ(said_by_ddp([&] { seed_everything(7, world.group()); }), "");
    at::Tensor own = at::randn({8}), all = at::empty({3, 8});
    world.group().all_gather(all, own).wait();
    EXPECT_FALSE(at::equal(all[0], all[1]));
    EXPECT_FALSE(at::equal(all[1], all[2]));
    // Rank 0 draws what a process by itself does.
    seed_everything(7);
    const torch::nn::Linear alone(6, 4);
    EXPECT_TRUE(at::equal(all[0], at::randn({8})));
    if (world.rank() > 0) {
      seed_everything(stream_seed({.seed = 7, .lane = world.rank()}));
      EXPECT_TRUE(at::equal(own, at::randn({8})));
    }
    // A second model: no warning, though the ranks have drawn different numbers by now.
    ::testing::internal::CaptureStderr();
    torch::nn::Linear second(6, 4);
    Ddp ddp(*second, world.group());
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  });
}

TEST(RandomStream, PutsTheGeneratorBackAlsoAfterAnException) {
  isolated([] {
    seed_everything(5);
    const auto want = at::randn({8});
    seed_everything(5);
    try {
      const RandomStream outer({.seed = 1});
      at::randn({100});
      const RandomStream inner({.seed = 2});
      throw std::runtime_error("mine");
    } catch (const std::runtime_error&) {
    }
    EXPECT_TRUE(at::equal(at::randn({8}), want));
  });
}

TEST(RandomStream, AnInnerStreamDoesNotMoveTheOuterOne) {
  isolated([] {
    const auto draws = [](bool with_inner) {
      const RandomStream outer({.seed = 1, .step = 3});
      const auto first = at::randn({4});
      if (with_inner) {
        const RandomStream inner({.seed = 1, .step = 3, .lane = 1});
        EXPECT_FALSE(at::equal(at::randn({4}), first));
      }
      return at::cat({first, at::randn({4})});
    };
    EXPECT_TRUE(at::equal(draws(false), draws(true)));
  });
}

// The masks of four lanes, by whichever ranks run them.
at::Tensor masks_of(World& world) {
  constexpr int64_t kLanes = 4;
  at::Tensor masks = at::zeros({kLanes, 64});
  const Range mine = Shard{world.rank(), world.size()}.of(kLanes);
  for (int64_t lane = mine.begin; lane < mine.end; ++lane) {
    const RandomStream stream({.seed = 9, .step = 12, .lane = lane});
    masks[lane] = at::dropout(at::ones({64}), 0.5, /*train=*/true);
  }
  world.group().all_reduce(masks).wait();
  return masks;
}

TEST(RandomStream, DropoutOfALaneIsTheSameOnAnyNumberOfRanks) {
  for (const int ranks : {2, 3, 4}) {
    spawn(ranks, [](World& world) {
      seed_everything(100 + world.rank());
      const auto masks = masks_of(world);
      World solo = World::solo();
      EXPECT_TRUE(at::equal(masks, masks_of(solo)));
      EXPECT_FALSE(at::equal(masks[0], masks[1]));
    });
  }
}

std::string value_of(const DeterminismReport& report, const std::string& name) {
  for (const auto& [key, value] : report.items) {
    if (key == name) return value;
  }
  return "(no " + name + ")";
}

TEST(DeterminismReport, SaysWhatIsPinned) {
  spawn(2, [](World& world) {
    at::set_num_threads(1);
    setenv("ONEDNN_MAX_CPU_ISA", "AVX2", 1);
    const auto report = determinism_report(world.group());
    EXPECT_EQ(value_of(report, "threads"), "1");
    EXPECT_EQ(value_of(report, "oneDNN"), "on (ONEDNN_MAX_CPU_ISA=AVX2)");
    EXPECT_EQ(value_of(report, "float32 products"), "exact");
    EXPECT_EQ(value_of(report, "sums over ranks"), "fixed tree over 2 ranks (shm)");
    EXPECT_THAT(report.text(), HasSubstr("threads 1, oneDNN on"));
    EXPECT_TRUE(report.differences(report).empty());
    at::set_num_threads(2);
    EXPECT_THAT(
        determinism_report(Group()).differences(report),
        ::testing::ElementsAre("threads: 2 here, 1 there",
                               "sums over ranks: none here, fixed tree over 2 ranks (shm) there"));
  });
}

TEST(DeterminismReport, ALibrarysOrderOfSumsIsSaid) {
  spawn(2,
        [](World& world) {
          EXPECT_EQ(value_of(determinism_report(world.group()), "sums over ranks"),
                    world.group().deterministic() ? "fixed tree over 2 ranks (gloo)"
                                                  : "the library's order over 2 ranks (gloo)");
        },
        {.backend = "gloo"});
}

// The settings by library and kind of layer, which libtorch advises, its older question refuses.
TEST(DeterminismReport, SaysWhichFloat32ProductsAreReduced) {
  isolated([] {
    const auto set = [](at::Float32Op op, at::Float32Precision precision) {
      at::globalContext().setFloat32Precision(at::Float32Backend::MKLDNN, op, precision);
      return value_of(determinism_report(Group()), "float32 products");
    };
    using at::Float32Op, at::Float32Precision;
    EXPECT_EQ(set(Float32Op::MATMUL, Float32Precision::BF16), "reduced (oneDNN matmul bf16)");
    EXPECT_EQ(set(Float32Op::CONV, Float32Precision::TF32),
              "reduced (oneDNN matmul bf16, oneDNN conv tf32)");
    set(Float32Op::CONV, Float32Precision::NONE);
    EXPECT_EQ(set(Float32Op::MATMUL, Float32Precision::NONE), "exact");
    at::globalContext().setFloat32MatmulPrecision("high");
    EXPECT_THAT(value_of(determinism_report(Group()), "float32 products"), HasSubstr("reduced ("));
  });
}

TEST(DeterminismReport, SaysWhatTheThreadsArithmeticDoesOtherwise) {
  isolated([] {
    const auto plain = determinism_report(Group());
    EXPECT_EQ(value_of(plain, "arithmetic"), "(no arithmetic)");
    ASSERT_TRUE(at::globalContext().setFlushDenormal(true));
    EXPECT_THAT(determinism_report(Group()).differences(plain),
                ::testing::ElementsAre("arithmetic: denormals flushed here, nothing there"));
    fesetround(FE_UPWARD);
    EXPECT_EQ(value_of(determinism_report(Group()), "arithmetic"),
              "not rounded to nearest, denormals flushed");
    at::globalContext().setFlushDenormal(false);
    EXPECT_EQ(value_of(determinism_report(Group()), "arithmetic"), "not rounded to nearest");
    fesetround(FE_TONEAREST);
    EXPECT_TRUE(determinism_report(Group()).differences(plain).empty());
  });
}

// put_ without accumulate writes in no fixed order.
TEST(DeterministicAlgorithms, AnOperationWithoutOneIsRefusedWhenOn) {
  isolated([] {
    const auto scatter = [] {
      at::zeros({4}).put_(at::arange(2), at::ones({2}), /*accumulate=*/false);
    };
    scatter();
    use_deterministic_algorithms(Deterministic::Error);
    EXPECT_EQ(value_of(determinism_report(Group()), "deterministic algorithms"), "on");
    EXPECT_ANY_THROW(scatter());
    use_deterministic_algorithms(Deterministic::Warn);
    EXPECT_EQ(value_of(determinism_report(Group()), "deterministic algorithms"), "warn");
    scatter();
    use_deterministic_algorithms(Deterministic::Off);
    EXPECT_EQ(value_of(determinism_report(Group()), "deterministic algorithms"), "off");
    scatter();
  });
}

}  // namespace
}  // namespace lockstep::test
