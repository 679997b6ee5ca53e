// The fused optimizers meet parameters that are listed twice, change their memory, have no
// elements, or other dtypes, as torch::optim does on whole ones.
#include <gmock/gmock.h>

#include <functional>

#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/fused_sgd.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using torch::optim::AdamOptions, torch::optim::AdamWOptions, torch::optim::SGDOptions;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(Groups)>;

struct FusedKind {
  std::string name;
  MakeOptimizer fused, usual;
};

template <typename Fused, typename Usual, typename Options>
FusedKind fused_kind(const std::string& name, const Options& options) {
  return {name, [=](Groups groups) { return std::make_unique<Fused>(std::move(groups), options); },
          [=](Groups groups) { return std::make_unique<Usual>(std::move(groups), options); }};
}

std::vector<FusedKind> fused_kinds() {
  // Another file of a unity build may have an Adam of its own.
  namespace optim = torch::optim;
  return {
      fused_kind<FusedAdam, optim::Adam>("Adam", AdamOptions(0.01).weight_decay(0.1)),
      fused_kind<FusedAdam, optim::Adam>("Adam with amsgrad", AdamOptions(0.01).amsgrad(true)),
      fused_kind<FusedAdamW, optim::AdamW>("AdamW", AdamWOptions(0.01)),
      fused_kind<FusedAdamW, optim::AdamW>("AdamW with amsgrad", AdamWOptions(0.01).amsgrad(true)),
      fused_kind<FusedSGD, optim::SGD>("SGD", SGDOptions(0.1)),
      fused_kind<FusedSGD, optim::SGD>("SGD with momentum", SGDOptions(0.1).momentum(0.9)),
  };
}

at::Tensor seeded(at::IntArrayRef sizes, uint64_t seed, at::ScalarType dtype = at::kFloat) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed)).to(dtype);
}

at::Tensor leaf_of(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return seeded(sizes, 1, dtype).requires_grad_();
}

void step_with(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, uint64_t seed) {
  parameter.mutable_grad() = seeded(parameter.sizes(), seed, parameter.scalar_type());
  optimizer.step();
}

TEST(Fused, AParameterListedTwiceIsSteppedOnceAndInTwoGroupsRefused) {
  isolated([] {
    for (const auto& kind : fused_kinds()) {
      SCOPED_TRACE(kind.name);
      const at::Tensor once = leaf_of({5, 4}), twice = leaf_of({5, 4});
      const auto first = kind.fused({{{once}}}), second = kind.fused({{{twice, twice}}});
      for (int step = 0; step < 3; ++step) {
        step_with(*first, once, step);
        step_with(*second, twice, step);
      }
      expect_equal({twice}, {once});
      const auto both = kind.fused({{{once}}, {{once}}});
      EXPECT_THROW(both->step(), ConfigError);
      expect_equal({twice}, {once});
    }
  });
}

TEST(Fused, AParameterMayChangeItsMemoryFormatBetweenSteps) {
  isolated([] {
    for (const auto& kind : fused_kinds()) {
      SCOPED_TRACE(kind.name);
      const at::Tensor kept = leaf_of({5, 4}), moved = leaf_of({5, 4});
      const auto first = kind.fused({{{kept}}}), second = kind.fused({{{moved}}});
      for (int step = 0; step < 6; ++step) {
        const at::NoGradGuard no_grad;
        // Between rows and columns in the order of memory, with a gradient of either.
        if (step == 2) moved.set_data(moved.t().contiguous().t());
        if (step == 4) moved.set_data(moved.contiguous());
        step_with(*first, kept, step);
        step_with(*second, moved, step);
        // Which elements a vectorised kernel takes together rounds the last place.
        EXPECT_TRUE(at::allclose(moved, kept, 1e-5, 1e-6)) << "step " << step;
      }
    }
  });
}

TEST(Fused, AParameterMayBecomeAnotherDtypeButNoOtherShape) {
  isolated([] {
    for (const auto& kind : fused_kinds()) {
      SCOPED_TRACE(kind.name);
      const at::Tensor parameter = leaf_of({5, 4}), wide = leaf_of({5, 4}, at::kDouble);
      const auto optimizer = kind.fused({{{parameter}}}), usual = kind.usual({{{wide}}});
      for (int step = 0; step < 4; ++step) {
        if (step == 2) {
          parameter.mutable_grad().reset();
          parameter.set_data(parameter.detach().to(at::kDouble));
        }
        step_with(*optimizer, parameter, step);
        step_with(*usual, wide, step);
      }
      EXPECT_TRUE(at::allclose(parameter, wide, 1e-5, 1e-5));

      if (kind.name == "SGD") continue;  // has no state
      parameter.mutable_grad().reset();
      parameter.set_data(at::ones({4, 5}, at::kDouble));
      EXPECT_THROW(step_with(*optimizer, parameter, 9), ConfigError);
      EXPECT_TRUE(at::equal(parameter, at::ones({4, 5}, at::kDouble)));
    }
  });
}

TEST(Fused, ShapesAndDtypesOfAllKindsAgreeWithTorch) {
  isolated([] {
    const auto parameters_of = [](at::ScalarType dtype) {
      std::vector<at::Tensor> all;
      for (const std::vector<int64_t>& sizes :
           std::initializer_list<std::vector<int64_t>>{{}, {0}, {3, 0, 2}, {7}, {1, 6}, {6, 1}}) {
        all.push_back(leaf_of(sizes, dtype));
      }
      return all;
    };
    for (const auto& kind : fused_kinds()) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
        SCOPED_TRACE(kind.name + " in " + c10::toString(dtype));
        const auto mine = parameters_of(dtype);
        // torch::optim's own are not for narrow dtypes, in which their eps is zero.
        std::vector<at::Tensor> usual;
        for (const auto& parameter : mine) {
          usual.push_back(parameter.detach().to(at::kDouble, false, true).requires_grad_());
        }
        const auto fused = kind.fused({{mine}}), whole = kind.usual({{usual}});
        for (int step = 0; step < 3; ++step) {
          for (size_t i = 0; i < mine.size(); ++i) {
            // The last has no gradient at first.
            if (step == 0 && i + 1 == mine.size()) continue;
            mine[i].mutable_grad() = seeded(mine[i].sizes(), 10 * step + i, dtype);
            usual[i].mutable_grad() = mine[i].grad().to(at::kDouble);
          }
          fused->step();
          whole->step();
        }
        const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
        for (size_t i = 0; i < mine.size(); ++i) {
          EXPECT_TRUE(at::allclose(mine[i].to(at::kDouble), usual[i], narrow ? 5e-2 : 1e-5,
                                   narrow ? 2e-2 : 1e-6))
              << "parameter " << i;
        }
      }
    }
  });
}

TEST(Fused, ComplexAndSparseGradientsAreRefusedBeforeAnythingChanged) {
  isolated([] {
    for (const auto& kind : fused_kinds()) {
      SCOPED_TRACE(kind.name);
      const at::Tensor first = leaf_of({3}),
                       odd = torch::ones({2}, at::kComplexFloat).requires_grad_();
      const auto optimizer = kind.fused({{{first, odd}}});
      const at::Tensor before = first.detach().clone();
      first.mutable_grad() = at::ones({3});
      odd.mutable_grad() = at::ones({2}, at::kComplexFloat);
      EXPECT_THROW(optimizer->step(), ConfigError);
      EXPECT_TRUE(at::equal(first, before));
      EXPECT_TRUE(optimizer->state().empty());
    }
  });
}

// As with torch::optim: autograd refuses a graph that has saved what is no longer there.
TEST(Fused, AGraphFromBeforeAStepCannotRunBackward) {
  isolated([] {
    for (const auto& kind : fused_kinds()) {
      SCOPED_TRACE(kind.name);
      const at::Tensor parameter = leaf_of({5, 4}), x = seeded({4, 3}, 2).requires_grad_();
      const auto optimizer = kind.fused({{{parameter}}});
      const at::Tensor loss = at::mm(parameter, x).sum();
      step_with(*optimizer, parameter, 3);
      EXPECT_THAT(message_of([&] { loss.backward(); }),
                  testing::HasSubstr("modified by an inplace operation"));
    }
  });
}

}  // namespace
}  // namespace lockstep::test
