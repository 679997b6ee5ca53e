#include "lockstep/data/standard_scaler.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <stdexcept>

#include "data/files.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/core/error.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using data::ConstantColumn;
using data::TensorDataset;
using testing::HasSubstr;

at::Tensor rows() {
  torch::manual_seed(1);
  return torch::randn({1001, 3}) * torch::tensor({1.0, 1e3, 1e-3}) + torch::tensor({1e6, 0.0, 1.0});
}

TensorDataset set_of(const at::Tensor& data) { return {data, torch::zeros({data.size(0)})}; }

std::string bits(const at::Tensor& tensor) {
  const auto values = tensor.contiguous();
  return {static_cast<const char*>(values.const_data_ptr()), values.nbytes()};
}

TEST(StandardScaler, GivesMeanZeroAndDeviationOne) {
  isolated([] {
    StandardScaler scaler;
    scaler.fit(set_of(rows()));
    const auto exact = rows().to(at::kDouble);
    EXPECT_TRUE(at::allclose(scaler.mean(), exact.mean(0), 1e-14));
    EXPECT_TRUE(at::allclose(scaler.deviation(), exact.std(0, /*unbiased=*/false), 1e-12));
    const auto scaled = scaler.apply(exact);
    EXPECT_LT(scaled.mean(0).abs().max().item<double>(), 1e-9);
    EXPECT_TRUE(at::allclose(scaler.invert(scaled), exact, 1e-14));
    EXPECT_EQ(scaler.apply(rows()).scalar_type(), at::kFloat);
    EXPECT_EQ(scaler.apply(torch::zeros({2, 3}, at::kLong)).scalar_type(), at::kFloat);
    EXPECT_EQ(scaler.apply(torch::zeros({2, 3, 1})).sizes(), (std::vector<int64_t>{2, 3, 1}));
  });
}

TEST(StandardScaler, TheSameBitsOnAnyNumberOfRanks) {
  const Folder folder;
  const std::vector<Ranks> worlds{{"shm", 1}, {"shm", 2},  {"shm", 3},
                                  {"tcp", 2}, {"gloo", 2}, {"host-then-net", 4, {0, 0, 1, 1}}};
  for (const Ranks& ranks : worlds) {
    spawn(ranks, [&](World& world) {
      StandardScaler scaler, of_parts;
      scaler.fit(set_of(rows()), world);
      // And when ranks have rows of their own, those after the second none.
      const std::vector<int64_t> begins{0, ranks.count == 1 ? 1001 : 400, 1001, 1001, 1001};
      of_parts.fit_rows(rows().slice(0, begins[static_cast<size_t>(world.rank())],
                                     begins[static_cast<size_t>(world.rank()) + 1]),
                        world);
      EXPECT_EQ(bits(scaler.mean()), bits(of_parts.mean()));
      EXPECT_EQ(bits(scaler.deviation()), bits(of_parts.deviation()));
      write(folder / fmt::format("{}-{}", ranks.name(), world.rank()),
            bits(scaler.mean()) + bits(scaler.deviation()));
    });
    for (int rank = 0; rank < ranks.count; ++rank) {
      EXPECT_EQ(contents(folder / fmt::format("{}-{}", ranks.name(), rank)),
                contents(folder / "shm1-0"))
          << ranks.name();
    }
  }
}

TEST(StandardScaler, IsATransformAndScalesTargets) {
  isolated([] {
    const auto data = rows(), target = torch::arange(1001).to(at::kFloat).unsqueeze(1);
    const TensorDataset set(data, target);
    StandardScaler scaler, of_targets;
    Loader loader(set, World::solo(),
                  {.batch_size = 1001,
                   .shuffle = false,
                   .transforms = {scaler.transform(), of_targets.transform_targets()}});
    scaler.fit(set);  // the loader's is the same
    of_targets.fit_targets(set);
    for (auto [x, y] : loader.epoch(0)) {
      EXPECT_TRUE(at::equal(x, scaler.apply(data)));
      EXPECT_TRUE(at::equal(y, of_targets.apply(target)));
    }
    EXPECT_EQ(of_targets.mean().item<double>(), 500);
  });
}

TEST(StandardScaler, SaysWhatItCannotScale) {
  spawn(2, [](World& world) {
    StandardScaler scaler;
    const auto refused = [&](at::Tensor data, const data::ScalerOptions& options = {}) {
      return message_of<DataError>([&] { scaler.fit(set_of(data), world, options); });
    };
    auto data = rows();
    data[900][1] = std::numeric_limits<double>::quiet_NaN();
    EXPECT_THAT(refused(data, {.names = {"a", "width", "c"}}),
                HasSubstr("rank 1: column 'width' (1) of sample 900 is nan"));
    data[3][2] = std::numeric_limits<double>::infinity();
    EXPECT_THAT(refused(data), HasSubstr("rank 0: column 2 of sample 3 is inf"));
    data = rows();
    data.select(1, 2).fill_(0.1);
    EXPECT_THAT(refused(data), HasSubstr("column 2 is constant: all 1001 values are 0.1"));
    EXPECT_FALSE(scaler.is_fitted());
    scaler.fit(set_of(data), world, {.constant = ConstantColumn::Zero});
    EXPECT_EQ(scaler.apply(data).select(1, 2).abs().max().item<double>(), 0);
    EXPECT_THAT(refused(rows().to(at::kDouble) * 1e200), HasSubstr("no standard deviation in"));
    EXPECT_THROW(scaler.restore({}, {}), ConfigError);
    EXPECT_THAT(message_of<ConfigError>([&] {
                  scaler.apply(torch::zeros({2, 4}));
                }),
                HasSubstr("samples [2, 4] have 4 columns; it was fitted to 3"));
    EXPECT_THAT(message_of<ConfigError>([] {
                  StandardScaler().apply(torch::zeros({1, 1}));
                }),
                HasSubstr("call fit() or restore"));
    EXPECT_THAT(message_of<ConfigError>([&] {
                  scaler.fit_rows(torch::randn({4, 2 + world.rank()}), world);
                }),
                HasSubstr("rank 1 has 3 columns, and others have 2"));
  });
}

// Samples as wide as their batch, and of which one rank cannot read some.
struct Uneven : data::Dataset {
  int64_t size() const override { return 20000; }
  data::Batch get_batch(at::IntArrayRef indices) const override {
    if (indices.back() >= broken_from) throw std::runtime_error("a torn file");
    const int64_t count = std::ssize(indices);
    return {torch::randn({count, indices.front() >= narrow_from ? 2 : 3}), torch::zeros({count})};
  }
  int64_t narrow_from = 20000, broken_from = 20000;
};

TEST(StandardScaler, OnAllRanksSaysWhatOneRankMeets) {
  spawn(2, [](World& world) {
    StandardScaler scaler;
    Uneven data;
    const auto refused = [&] { return message_of([&] { scaler.fit(data, world); }); };
    data.narrow_from = 14096;
    EXPECT_THAT(refused(), HasSubstr("rank 1: samples from 14096 on have 2 columns, and those "
                                     "before have 3"));
    data.narrow_from = data.size();
    data.broken_from = 15000;
    EXPECT_EQ(refused(),
              world.rank() == 1 ? "a torn file" : "[standard scaler] rank 1: a torn file");
    EXPECT_FALSE(scaler.is_fitted());
    data.broken_from = data.size();
    scaler.fit(data, world);
  });
}

// Which one rank can read once, from a folder over the network for example; or which is then
// another.
struct Once : data::Dataset {
  int64_t size() const override { return 100; }
  data::Batch get_batch(at::IntArrayRef indices) const override {
    const bool again = seen++ > 0;
    if (again && breaks) throw std::runtime_error("the file is gone");
    const int64_t count = std::ssize(indices);
    return {torch::randn({count, again && narrows ? 1 : 3}), torch::zeros({count})};
  }
  bool breaks = false, narrows = false;
  mutable int seen = 0;
};

TEST(StandardScaler, OnAllRanksSaysWhatOneRankCannotReadAgain) {
  spawn(3, [](World& world) {
    StandardScaler scaler;
    Once gone, narrow, good;
    gone.breaks = narrow.narrows = world.rank() == 1;
    const auto refused = [&](const Once& data) {
      return message_of([&] { scaler.fit(data, world); });
    };
    EXPECT_EQ(refused(gone), world.rank() == 1 ? "the file is gone"
                                               : "[standard scaler] rank 1: the file is gone");
    EXPECT_THAT(refused(narrow), HasSubstr("rank 1: samples from 33 on have 1 columns, and those "
                                           "before have 3"));
    EXPECT_FALSE(scaler.is_fitted());
    scaler.fit(good, world);
    EXPECT_TRUE(scaler.is_fitted());
  });
}

// The others waited for its rows.
TEST(StandardScaler, OnAllRanksSaysThatOneRanksRowsCannotBeScaled) {
  spawn(2, [](World& world) {
    StandardScaler scaler;
    const auto mine = world.rank() == 0 ? rows() : rows().to(at::kComplexDouble);
    EXPECT_THAT(message_of<Error>([&] { scaler.fit_rows(mine, world); }),
                HasSubstr(world.rank() == 1 ? "[standard scaler] data are complex"
                                            : "rank 1: [standard scaler] data are complex"));
    scaler.fit_rows(rows(), world);
    EXPECT_TRUE(scaler.is_fitted());
  });
}

// A column of a table is not one block of memory.
TEST(StandardScaler, MeasuresAColumnOfATable) {
  isolated([] {
    const auto table = torch::arange(12, at::kDouble).view({4, 3});
    for (const auto& column : {table.select(1, 1), table.slice(1, 1, 2)}) {
      StandardScaler scaler;
      scaler.fit_rows(column);
      EXPECT_EQ(scaler.mean().item<double>(), 5.5);
      EXPECT_TRUE(
          at::allclose(scaler.deviation(), column.clone().std(0, /*unbiased=*/false), 1e-14));
    }
  });
}

TEST(StandardScaler, IsSavedAndRestored) {
  const Folder folder;
  const auto run = [&](int ranks, const auto& body) {
    spawn(ranks, [&](World& world) {
      StandardScaler scaler;
      Checkpointer checkpoints(world.group(), folder / "saved");
      checkpoints.track("scaler", scaler);
      body(world, scaler, checkpoints);
    });
  };
  run(2, [](World& world, StandardScaler& scaler, Checkpointer& checkpoints) {
    scaler.fit(set_of(rows()), world);
    checkpoints.save(1);
  });
  run(3, [](World&, StandardScaler& scaler, Checkpointer& checkpoints) {
    checkpoints.restore_latest();
    StandardScaler fitted;
    fitted.fit(set_of(rows()));
    EXPECT_EQ(bits(scaler.mean()), bits(fitted.mean()));
    EXPECT_EQ(bits(scaler.deviation()), bits(fitted.deviation()));
    scaler.fit_rows(rows().slice(1, 0, 2));
    EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.restore_latest(); }),
                HasSubstr("scaler/mean"));
  });
}

TEST(StandardScaler, WhatWasSavedWithoutScalingIsNotGoneOnWith) {
  const Folder folder;
  spawn(2, [&](World& world) {
    StandardScaler scaler;
    int64_t step = 1;
    Checkpointer checkpoints(world.group(), folder / "saved");
    checkpoints.track("scaler", scaler);
    checkpoints.track("step", step);
    checkpoints.save(1);
    checkpoints.restore_latest();
    EXPECT_FALSE(scaler.is_fitted());
    scaler.fit(set_of(rows()), world);
    const auto fitted = bits(scaler.mean());
    EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.restore_latest(); }),
                testing::AllOf(HasSubstr("scaler/mean is missing"),
                               HasSubstr("scaler/deviation is missing")));
    checkpoints.restore_latest({.allow_missing = {"scaler/*"}});
    EXPECT_EQ(bits(scaler.mean()), fitted);
  });
}

}  // namespace
}  // namespace lockstep::test
