#include "lockstep/data/tensor_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "data/files.h"
#include "lockstep/core/error.h"
#include "lockstep/data/synthetic_regression.h"

namespace lockstep::data {
namespace {

using test::message_of;
using testing::HasSubstr;

// Rows of 1, 3, 4, 8 and 24 bytes, and of none.
TEST(TensorDataset, GathersRowsOfEveryWidth) {
  const std::vector<int64_t> indices{4, 0, 4, 2};
  const auto order = at::tensor(indices, at::kLong);
  for (const auto& data :
       {at::arange(5, at::kChar), at::arange(15, at::kByte).view({5, 3}), at::arange(5, at::kFloat),
        at::arange(5, at::kLong), at::arange(15, at::kDouble).view({5, 3}), at::empty({5, 0})}) {
    const TensorDataset set(data, at::arange(5));
    const auto [x, y] = set.get_batch(indices);
    EXPECT_EQ(x.scalar_type(), data.scalar_type());
    EXPECT_TRUE(x.equal(data.index_select(0, order)));
    EXPECT_TRUE(y.equal(order));
  }
}

// Of two float32, and of four bytes: the first begins at the second element of other memory. With
// the numbers of 8 and 4 bytes that they were copied as, this was undefined (UBSan).
TEST(TensorDataset, GathersRowsThatBeginAtAnyAddress) {
  for (const auto& whole : {at::arange(11, at::kFloat), at::arange(21, at::kByte)}) {
    const auto data = whole.slice(0, 1).view({5, -1});
    const TensorDataset set(data, at::arange(5));
    EXPECT_EQ(set.data().const_data_ptr(), data.const_data_ptr());
    EXPECT_TRUE(set.get_batch({4, 0}).data.equal(data.index_select(0, at::tensor({4, 0}))));
  }
}

TEST(TensorDataset, TakesAnyLayoutAndLeavesAutogradOut) {
  const auto data = torch::rand({3, 4}, torch::requires_grad()).t();
  const auto x = TensorDataset(data, at::arange(4)).get_batch({3, 1}).data;
  EXPECT_FALSE(x.requires_grad());
  EXPECT_TRUE(x.equal(data.detach().index_select(0, at::tensor({3, 1}))));
}

TEST(TensorDataset, ConjugatesAndNegativesThatAreStillToBeComputed) {
  const at::Tensor base = at::randn({4, 3}, at::kComplexFloat);
  const TensorDataset set(base.conj(), at::_neg_view(at::ones({4})));
  const Batch batch = set.get_batch({2, 0});
  EXPECT_TRUE(batch.data.equal(base.conj().index_select(0, at::tensor({2, 0}))));
  EXPECT_TRUE(batch.target.equal(at::full({2}, -1.0F)));
}

TEST(TensorDataset, EmptyBatch) {
  EXPECT_EQ(TensorDataset(at::rand({3, 2}), at::arange(3)).get_batch({}).data.sizes(),
            (at::IntArrayRef{0, 2}));
}

TEST(TensorDataset, IndexOutside) {
  const TensorDataset set(at::arange(3), at::arange(3));
  EXPECT_THAT(message_of<DataError>([&] {
                (void)set.get_batch({1, 3});
              }),
              HasSubstr("sample 3 does not exist: there are 3"));
}

TEST(TensorDataset, TensorsMustFit) {
  EXPECT_THAT(message_of<ConfigError>([] {
                TensorDataset(at::rand({3, 2}), at::arange(4));
              }),
              HasSubstr("data [3, 2] and target [4]"));
  EXPECT_THAT(message_of<ConfigError>([] { TensorDataset(at::rand({3}), {}); }),
              HasSubstr("undefined"));
}

// A batch that the receiver made something of is not overwritten.
TEST(TensorDataset, RefillSparesWhatIsInUse) {
  const TensorDataset set(at::arange(8, at::kFloat), at::arange(8));
  Batch batch = set.get_batch({0, 1});
  const auto* memory = batch.data.const_data_ptr();
  batch.data.requires_grad_();
  batch = set.refill(std::move(batch), {2, 3});
  EXPECT_NE(batch.data.const_data_ptr(), memory);
  EXPECT_FALSE(batch.data.requires_grad());

  const at::Tensor kept = batch.data;
  batch = set.refill(std::move(batch), {4, 5});
  EXPECT_TRUE(kept.equal(at::tensor({2.0F, 3.0F})));
  EXPECT_EQ(set.refill(std::move(batch), {6}).data.numel(), 1);
}

TEST(SyntheticRegression, IsTheLineWithPythonsBits) {
  const SyntheticRegression set(1000, {.seed = 7});
  torch::manual_seed(7);
  const auto x = torch::rand({1000, 1}) * 2 - 1;
  EXPECT_TRUE(set.data().equal(x));
  EXPECT_TRUE(set.target().equal(2.0 * x + 3.0 + 0.1 * torch::randn({1000, 1})));
}

TEST(SyntheticRegression, OptionsSetTheLine) {
  const SyntheticRegression set(10, {.slope = -4, .intercept = 0.5, .noise = 0});
  EXPECT_TRUE(set.target().equal(-4.0 * set.data() + 0.5));
  EXPECT_FALSE(SyntheticRegression(10, {.seed = 2}).data().equal(set.data()));
}

TEST(SyntheticRegression, RefusesNoSamples) {
  EXPECT_THAT(message_of<ConfigError>([] { SyntheticRegression(0); }), HasSubstr("0 samples"));
}

}  // namespace
}  // namespace lockstep::data
