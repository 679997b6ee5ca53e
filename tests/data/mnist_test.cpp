#include "lockstep/data/mnist.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "data/files.h"
#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

using test::Folder;
using test::gzip;
using test::idx;
using test::message_of;
using test::write;
using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kPixels = 28 * 28;

// Three images: pixel p of image i is byte i + p, so that all 256 values come up; labels 7, 0, 9.
std::string images(uint32_t count = 3) {
  std::string elements;
  for (uint32_t i = 0; i < count; ++i) {
    for (int64_t p = 0; p < kPixels; ++p) elements += static_cast<char>(i + p);
  }
  return idx({count, 28, 28}, elements);
}
const std::string kLabels("\7\0\x09", 3);

class MnistFiles : public testing::Test {
 protected:
  MnistFiles() {
    write(images_, images());
    write(labels_, idx({3}, kLabels));
  }
  std::string failure() const {
    return message_of<DataError>([&] { Mnist(folder_.path(), Split::Train); });
  }

  Folder folder_;
  std::filesystem::path images_ = folder_ / "train-images-idx3-ubyte";
  std::filesystem::path labels_ = folder_ / "train-labels-idx1-ubyte";
};

TEST_F(MnistFiles, BatchHasPythonsBits) {
  const FashionMnist set(folder_.path(), Split::Train);
  ASSERT_EQ(set.size(), 3);
  const auto [x, y] = set.get_batch({2, 0});
  const auto byte = at::stack({at::arange(2, 2 + kPixels), at::arange(kPixels)}).remainder(256);
  EXPECT_TRUE(x.equal(byte.to(at::kFloat).div(255).sub(0.2860F).div(0.3530F)));
  EXPECT_TRUE(y.equal(at::tensor({9, 7}, at::kLong)));
}

TEST_F(MnistFiles, OptionsSetScaleAndShape) {
  const Mnist set(folder_.path(), Split::Train,
                  {.mean = 0.5F, .deviation = 0.25F, .flatten = false});
  const auto x = set.get_batch(1).data;
  EXPECT_EQ(x.sizes(), (at::IntArrayRef{1, 1, 28, 28}));
  EXPECT_EQ(x[0][0][0][0].item<float>(), (1.0F / 255 - 0.5F) / 0.25F);
  EXPECT_THAT(
      message_of<ConfigError>([&] { Mnist(folder_.path(), Split::Train, {.deviation = 0.0F}); }),
      HasSubstr("deviation must be positive"));
}

TEST_F(MnistFiles, MnistHasItsOwnScale) {
  const auto x = Mnist(folder_.path(), Split::Train).get_batch(0).data;
  EXPECT_EQ(x[0][0].item<float>(), -0.1307F / 0.3081F);
}

TEST_F(MnistFiles, GzipIsFoundToo) {
  std::filesystem::remove(images_);
  write(images_.string() + ".gz", gzip(images()));
  EXPECT_EQ(Mnist(folder_.path(), Split::Train).size(), 3);
}

TEST_F(MnistFiles, IndexOutside) {
  const Mnist set(folder_.path(), Split::Train);
  for (const int64_t index : {-1, 3}) {
    EXPECT_THAT(message_of<DataError>([&] {
                  (void)set.get_batch({0, index});
                }),
                HasSubstr("sample " + std::to_string(index) + " does not exist: there are 3"));
  }
}

// The memory of a batch serves again only when nobody can see it.
TEST_F(MnistFiles, RefillTakesWhatIsFree) {
  const Mnist set(folder_.path(), Split::Train);
  Batch batch = set.get_batch({0, 1});
  const auto* memory = batch.data.const_data_ptr();
  batch = set.refill(std::move(batch), {1, 2});
  EXPECT_EQ(batch.data.const_data_ptr(), memory);
  EXPECT_TRUE(batch.data.equal(set.get_batch({1, 2}).data));

  const at::Tensor view = batch.data.narrow(0, 0, 1);
  const at::Tensor before = view.clone();
  batch = set.refill(std::move(batch), {0, 1});
  EXPECT_NE(batch.data.const_data_ptr(), memory);
  EXPECT_TRUE(view.equal(before));
}

TEST_F(MnistFiles, FolderMissing) {
  EXPECT_THAT(message_of<DataError>([] { FashionMnist("/nowhere", Split::Test); }),
              AllOf(HasSubstr("'/nowhere', found no such folder"),
                    HasSubstr("t10k-images-idx3-ubyte.gz"), HasSubstr("dataset-fashion-mnist")));
}

TEST_F(MnistFiles, FileMissing) {
  std::filesystem::remove(labels_);
  EXPECT_THAT(failure(),
              AllOf(HasSubstr("expected train-labels-idx1-ubyte"), HasSubstr("neither")));
}

TEST_F(MnistFiles, Truncated) {
  write(images_, images().substr(0, 1000));
  EXPECT_THAT(failure(), AllOf(HasSubstr(images_.string()), HasSubstr("truncated")));
}

TEST_F(MnistFiles, NotGzip) {
  std::filesystem::remove(images_);
  write(images_.string() + ".gz", "<html>404</html>");
  EXPECT_THAT(failure(), AllOf(HasSubstr("wrong magic"), HasSubstr("not gzip")));
}

TEST_F(MnistFiles, ImagesAndLabelsExchanged) {
  std::filesystem::rename(images_, folder_ / "x");
  std::filesystem::rename(labels_, images_);
  std::filesystem::rename(folder_ / "x", labels_);
  EXPECT_THAT(failure(), HasSubstr("wrong sizes: expected N, found 3 x 28 x 28"));
}

TEST_F(MnistFiles, OtherImageSize) {
  write(images_, idx({3, 2, 2}, std::string(12, 'x')));
  EXPECT_THAT(failure(), HasSubstr("wrong sizes: expected N x 28 x 28, found 3 x 2 x 2"));
}

TEST_F(MnistFiles, CountsDiffer) {
  write(images_, images(2));
  EXPECT_THAT(failure(), AllOf(HasSubstr("2 images in"), HasSubstr("3 labels in")));
}

TEST_F(MnistFiles, NoSamples) {
  write(labels_, idx({0}, ""));
  EXPECT_THAT(failure(), HasSubstr("expected at least one sample, found 0"));
}

TEST_F(MnistFiles, LabelOutside) {
  write(labels_, idx({3}, "\1\2\x0a"));
  EXPECT_THAT(failure(), HasSubstr("sample 2: expected a label from 0 to 9, found 10"));
}

}  // namespace
}  // namespace lockstep::data
