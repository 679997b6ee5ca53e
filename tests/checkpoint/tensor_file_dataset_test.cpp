#include "lockstep/checkpoint/tensor_file_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/checkpoint/interchange.h"
#include "lockstep/core/error.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::TensorFileOptions;
using testing::AllOf;
using testing::HasSubstr;

struct Columns : torch::nn::Module {
  Columns() {
    images = register_buffer("inputs", torch::rand({5, 2, 3}));
    labels = register_buffer("targets", torch::tensor({1, 0, 2, 1, 0}, at::kInt));
    age = register_buffer("age", torch::tensor({1, 2, 3, 4, 5}, at::kLong));
    size = register_buffer("size", torch::rand({5, 2}, at::kDouble));
    register_buffer("scalar", torch::tensor(1.0));
    register_buffer("short", torch::rand({4}));
  }
  at::Tensor images, labels, age, size;
};

TEST(TensorFileDataset, SafetensorsByName) {
  isolated([] {
    const Folder folder;
    const Columns columns;
    const std::string path = folder / "set.safetensors";
    save_safetensors(columns, path);
    const TensorFileDataset set(path);
    EXPECT_TRUE(at::equal(set.data(), columns.images));
    EXPECT_TRUE(at::equal(set.target(), columns.labels.to(at::kLong)));
    const TensorFileDataset table(path, {.data = {"age", "size"}, .targets = {"targets"}});
    EXPECT_EQ(table.data().sizes(), (std::vector<int64_t>{5, 3}));
    EXPECT_TRUE(at::equal(table.data().select(1, 0), columns.age.to(at::kFloat)));
    EXPECT_EQ(table.get_batch({4, 1}).target.sizes(), (std::vector<int64_t>{2}));

    const auto refused = [&](const TensorFileOptions& options) {
      return message_of<Error>([&] { TensorFileDataset(path, options); });
    };
    EXPECT_THAT(refused({.data = {"input"}}),
                AllOf(HasSubstr("[tensor file]"), HasSubstr("did you mean 'inputs'?")));
    EXPECT_THAT(refused({.data = {"short"}}),
                HasSubstr("'short' has 4 samples, and 'targets' has 5"));
    EXPECT_THAT(refused({.data = {"age", "short"}}), HasSubstr("'short' has 4 samples"));
    EXPECT_THAT(refused({.data = {"scalar"}}), HasSubstr("no samples along a first dimension"));
    EXPECT_THAT(refused({.data = {}}), HasSubstr("at least one name"));
    write(path, contents(path).substr(0, 40));
    EXPECT_THAT(refused({}), HasSubstr("set.safetensors"));
  });
}

}  // namespace
}  // namespace lockstep::test
