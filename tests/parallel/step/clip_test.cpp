// Clipping gives Python's values; on shards, those of the whole.
#include "lockstep/parallel/clip.h"

#include <limits>

#include "parallel/python.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

at::Tensor parameter(const at::Tensor& gradient) {
  auto tensor = torch::zeros(gradient.sizes(), gradient.scalar_type()).requires_grad_(true);
  tensor.mutable_grad() = gradient;
  return tensor;
}

// The same as in reference.py.
std::vector<at::Tensor> seeded_parameters() {
  std::vector<at::Tensor> all;
  auto generator = at::detail::createCPUGenerator(3);
  for (const int64_t size : {5, 400, 1}) all.push_back(parameter(at::randn({size}, generator)));
  return all;
}

TEST(ClipGradNorm, NormsAndGradientsAreThoseOfPythonBitForBit) {
  const auto python = python_numbers("clip_grad_norm");
  isolated([&] {
    size_t at = 0;
    for (const double p : {2.0, 1.0, 3.5, kInf}) {
      for (const double max_norm : {0.7, 1e9}) {
        const auto parameters = seeded_parameters();
        const auto norm = clip_grad_norm_(parameters, max_norm, {.norm_type = p});
        EXPECT_EQ(norm.item<double>(), python.at(at++)) << "p = " << p;
        for (const auto& each : parameters) {
          EXPECT_EQ(each.grad()[0].item<double>(), python.at(at++)) << "p = " << p;
        }
      }
    }
    EXPECT_EQ(at, python.size());
  });
}

// Rank r has every W-th of the gradients and the norm is of all: the sum over shards is taken in
// float64 and rounded once, so that the norm may differ in the last place from one taken at once.
TEST(ClipGradNorm, ShardsAreClippedByTheNormOfTheWhole) {
  for (const int ranks : {2, 3, 4}) {
    spawn(ranks, [](World& world) {
      for (const double p : {2.0, 3.5, kInf}) {
        const auto whole = seeded_parameters();
        const auto want = clip_grad_norm_(whole, 0.7, {.norm_type = p}).item<double>();
        std::vector<at::Tensor> mine;
        const auto all = seeded_parameters();
        for (size_t i = world.rank(); i < all.size(); i += world.size()) mine.push_back(all[i]);
        const auto norm = clip_grad_norm_(mine, 0.7, {.norm_type = p, .group = world.group()});
        EXPECT_NEAR(norm.item<double>(), want, 2e-6 * want);
        for (size_t i = 0; i < mine.size(); ++i) {
          EXPECT_TRUE(
              at::allclose(mine[i].grad(), whole[world.rank() + i * world.size()].grad(), 3e-6));
        }
      }
    });
  }
}

TEST(ClipGradNorm, TheNormOfAGroupIsOneTensorOnAllRanks) {
  spawn(2, [](World& world) {
    auto mine = parameter(at::full({3}, 1. / 3, at::kDouble));
    if (world.rank() == 1) mine.mutable_grad() = at::Tensor();
    const auto norm = clip_grad_norm_({mine}, 100, {.group = world.group()});
    EXPECT_EQ(norm.scalar_type(), at::kDouble);
    EXPECT_EQ(norm.item<double>(), at::full({3}, 1. / 3, at::kDouble).norm().item<double>());
    const auto narrow = parameter(at::ones({3}, world.rank() == 0 ? at::kBFloat16 : at::kHalf));
    EXPECT_EQ(clip_grad_norm_({narrow}, 1, {.group = world.group()}).scalar_type(), at::kFloat);
  });
}

TEST(ClipGradNorm, ParametersWithoutGradientsElementsOrASecondEntry) {
  isolated([] {
    EXPECT_EQ(clip_grad_norm_({}, 1).item<double>(), 0);
    const auto twice = parameter(at::full({1}, 10.0));
    const auto empty = parameter(at::zeros({0}));
    const auto none = torch::ones({2}).requires_grad_(true);
    for (const double p : {2.0, kInf}) {
      twice.mutable_grad().fill_(10);
      EXPECT_EQ(clip_grad_norm_({twice, empty, none, twice}, 1, {.norm_type = p}).item<double>(),
                10);
      EXPECT_NEAR(twice.grad().item<double>(), 1, 1e-6);
    }
    EXPECT_EQ(clip_grad_norm_({empty}, 1, {.norm_type = kInf}).item<double>(), 0);
    const auto wide = parameter(at::zeros({0}, at::kDouble));
    EXPECT_EQ(clip_grad_norm_({wide}, 1).scalar_type(), at::kDouble);
    twice.mutable_grad().fill_(10);
    EXPECT_EQ(clip_grad_norm_({twice, wide}, 1).scalar_type(), at::kDouble);
  });
}

TEST(ClipGradNorm, SparseAndNarrowGradients) {
  isolated([] {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(5, 2).sparse(true));
    table->forward(at::tensor({3, 3, 1})).sum().backward();
    const auto half = parameter(at::full({4}, 2.0).to(at::kHalf));
    const double norm = std::sqrt(2 * 4 + 2 * 1 + 4 * 4);
    EXPECT_NEAR(clip_grad_norm_({table->weight, half}, norm / 2).item<double>(), norm, 1e-2);
    EXPECT_NEAR(table->weight.grad().to_dense()[3][0].item<double>(), 1, 1e-3);
    EXPECT_NEAR(half.grad()[0].item<double>(), 1, 1e-3);
    EXPECT_EQ(half.grad().scalar_type(), at::kHalf);
  });
}

// As of one vector of everything, whatever it consists of.
TEST(ClipGradNorm, MixedDtypesLayoutsAndComplexGradientsAreOneVector) {
  isolated([] {
    for (const double p : {1.0, 2.0, 3.0, kInf}) {
      SCOPED_TRACE(p);
      auto generator = at::detail::createCPUGenerator(5);
      const auto dense = parameter(at::randn({3, 4}, generator).t());
      const auto wide = parameter(at::randn({7}, generator).to(at::kDouble));
      const auto narrow = parameter(at::randn({6}, generator).to(at::kBFloat16));
      const auto complex = parameter(at::randn({4}, generator, at::kComplexFloat));
      // Uncoalesced: one index twice.
      auto sparse = torch::zeros({5, 2}).requires_grad_();
      sparse.mutable_grad() =
          at::sparse_coo_tensor(torch::tensor({{3, 3, 1}}), at::ones({3, 2}), {5, 2});
      const std::vector<at::Tensor> all{dense,   wide,   narrow,
                                        complex, sparse, torch::ones({2}).requires_grad_()};
      const auto flat = [&] {
        std::vector<at::Tensor> parts;
        for (const auto& each : all) {
          if (!each.grad().defined()) continue;
          const at::Tensor values =
              each.grad().layout() == at::kSparse ? each.grad().to_dense() : each.grad();
          parts.push_back(values.abs().flatten().to(at::kDouble));
        }
        return at::cat(parts);
      };
      const double want = at::linalg_vector_norm(flat(), p).item<double>();
      EXPECT_NEAR(clip_grad_norm_(all, want / 2, {.norm_type = p}).item<double>(), want,
                  1e-2 * want);
      EXPECT_NEAR(at::linalg_vector_norm(flat(), p).item<double>(), want / 2, 1e-2 * want);
      EXPECT_FALSE(all.back().grad().defined());
    }
  });
}

TEST(ClipGradNorm, ARankWithoutGradientsHearsTheNormOfTheOthers) {
  spawn(3, [](World& world) {
    for (const double p : {1.0, 2.0, kInf}) {
      std::vector<at::Tensor> mine{torch::ones({3}).requires_grad_()};
      if (world.rank() > 0) mine.push_back(parameter(at::full({4}, 3.0)));
      const double want = p == 1.0 ? 24 : p == 2.0 ? std::sqrt(72) : 3;
      const auto norm = clip_grad_norm_(mine, 1, {.norm_type = p, .group = world.group()});
      EXPECT_NEAR(norm.item<double>(), want, 1e-5);
    }
  });
}

TEST(ClipGradNorm, ANormThatIsNotFiniteIsAnErrorOnAllRanksIfAsked) {
  spawn(2, [](World& world) {
    const auto bad = parameter(at::full({2}, world.rank() == 1 ? kNan : 3.0));
    for (const double p : {2.0, kInf}) {
      EXPECT_THROW(
          clip_grad_norm_({bad}, 1,
                          {.norm_type = p, .error_if_nonfinite = true, .group = world.group()}),
          Error);
    }
    if (world.rank() == 0) {
      EXPECT_TRUE(at::equal(bad.grad(), at::full({2}, 3.0)));
    }
    clip_grad_norm_({bad}, 1, {.group = world.group()});
    EXPECT_TRUE(at::isnan(bad.grad()).all().item<bool>());
  });
}

TEST(ClipGradNorm, WrongArgumentsAreRefused) {
  isolated([] {
    EXPECT_THROW(clip_grad_norm_({}, -1), ConfigError);
    EXPECT_THROW(clip_grad_norm_({}, kNan), ConfigError);
    EXPECT_THROW(clip_grad_norm_({}, 1, {.norm_type = 0}), ConfigError);
    EXPECT_THROW(clip_grad_value_({}, -1), ConfigError);
  });
}

TEST(ClipGradValue, ClampsWhatIsFiniteAndKeepsNaN) {
  isolated([] {
    const auto some = parameter(at::tensor({-3.0, 0.5, 2.0, kNan, kInf}));
    clip_grad_value_({some, torch::ones({2})}, 1);
    EXPECT_THROW(clip_grad_value_({parameter(at::ones({1}, at::kComplexFloat))}, 1), ConfigError);
    EXPECT_TRUE(at::equal(some.grad().slice(0, 0, 3), at::tensor({-1.0, 0.5, 1.0})));
    EXPECT_TRUE(std::isnan(some.grad()[3].item<double>()));
    EXPECT_EQ(some.grad()[4].item<double>(), 1);
  });
}

TEST(CheckFinite, NamesTheParametersAndRanksOnAllRanks) {
  spawn(3, [](World& world) {
    Mlp net;
    square_loss(net, 0).backward();
    check_finite(net, world.group());
    if (world.rank() == 1) net.second->weight.mutable_grad()[0][0] = kNan;
    if (world.rank() == 2) net.third->bias.mutable_grad().fill_(kInf);
    try {
      check_finite(net, world.group());
      FAIL() << "accepted";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("'second.weight' on rank 1 (1 NaN and 0 infinite of 64)"),
                        HasSubstr("'third.bias' on rank 2 (0 NaN and 3 infinite of 3)"),
                        Not(HasSubstr("first"))));
    }
  });
}

// The sum of their squares is infinite, they are not.
TEST(CheckFinite, AcceptsGradientsWhoseSquaresOverflow) {
  spawn(2, [](World& world) {
    Mlp net;
    net.first->weight.mutable_grad() = at::full({8, 6}, 1e30);
    check_finite(net, world.group());
  });
}

}  // namespace
}  // namespace lockstep::test
