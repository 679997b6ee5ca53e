#include "lockstep/data/idx_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "data/files.h"
#include "lockstep/core/error.h"

namespace lockstep::test {
namespace {

using data::IdxDataset;
using testing::HasSubstr;

TEST(IdxDataset, BytesAndLabels) {
  const Folder folder;
  write(folder / "x", gzip(idx({2, 1, 3}, std::string("\x00\xff\x33\x01\x02\x03", 6))));
  write(folder / "y", idx({2}, std::string("\x2e\x00", 2)));
  write(folder / "three", idx({3}, "abc"));
  const IdxDataset set(folder / "x", folder / "y");
  EXPECT_EQ(set.data().sizes(), (std::vector<int64_t>{2, 1, 3}));
  EXPECT_EQ(set.data()[0][0][2].item<float>(), 51.0F / 255);
  EXPECT_TRUE(at::equal(set.target(), torch::tensor({46, 0})));
  const auto refused = [&](const char* data, const char* labels) {
    return message_of<DataError>([&] { IdxDataset(folder / data, folder / labels); });
  };
  EXPECT_THAT(refused("x", "three"), HasSubstr("2 samples in"));
  EXPECT_THAT(refused("x", "x"), HasSubstr("labels have one dimension, not 2 x 1 x 3"));
}

}  // namespace
}  // namespace lockstep::test
