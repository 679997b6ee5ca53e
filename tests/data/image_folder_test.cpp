#include "lockstep/data/image_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>

#include "data/files.h"
#include "data/image_files.h"
#include "lockstep/core/error.h"
#include "lockstep/data/loader.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using data::BadImages;
using data::ImageFit;
using data::ImageFolderOptions;
using data::read_image;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// A folder of two classes: plain colours, so that resizing changes nothing.
struct Flowers {
  Flowers() {
    put("rose/b.png", png_of(torch::full({6, 9, 3}, 200, at::kByte)));
    put("rose/a/deep.PNG", png_of(torch::full({9, 6, 3}, 100, at::kByte)));
    put("daisy/x.jpg", jpeg_of(torch::full({8, 8, 3}, 50, at::kByte)));
    put("daisy/notes.txt", "no image");
  }
  void put(const std::string& name, const std::string& bytes) const {
    std::filesystem::create_directories(std::filesystem::path(folder / name).parent_path());
    write(folder / name, bytes);
  }
  data::ImageFolder open(const ImageFolderOptions& options = {.size = 4}) const {
    return data::ImageFolder(folder.path(), options);
  }
  std::string refused(const ImageFolderOptions& options = {.size = 4}) const {
    return message_of<Error>([&] { open(options); });
  }
  Folder folder;
};

TEST(ImageFolder, ClassesAndSamplesInTheOrderOfNames) {
  const Flowers flowers;
  const auto set = flowers.open({.size = 4, .mean = {0, 0, 0}, .deviation = {1, 1, 1}});
  EXPECT_THAT(set.classes(), ElementsAre("daisy", "rose"));
  ASSERT_EQ(set.size(), 3);
  EXPECT_EQ(set.file(2).filename(), "deep.PNG");
  const auto batch = set.get_batch({0, 1, 2});
  EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{3, 3, 4, 4}));
  EXPECT_TRUE(at::equal(batch.target, torch::tensor({0, 1, 1})));
  const float pixels[] = {50, 200, 100};
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::allclose(batch.data[i], torch::full({3, 4, 4}, pixels[i] / 255), 0, 1e-6)) << i;
  }
  const auto test = flowers.open({.size = 4, .classes = {"tulip", "rose", "daisy"}});
  EXPECT_TRUE(at::equal(test.get_batch({0, 2}).target, torch::tensor({2, 1})));
  EXPECT_THAT(flowers.refused({.size = 4, .classes = {"rose"}}),
              HasSubstr("'daisy' is none of the classes rose"));
}

// Folders by their whole paths, and then names.
TEST(ImageFolder, NestedFoldersAreInTorchvisionsOrder) {
  const Flowers flowers;
  const std::string png = png_of(torch::full({4, 4, 3}, 1, at::kByte));
  const std::vector<std::string> names = {"10.png", "9.png", "z.png", "a/x.png", "a-b/y.png"};
  for (const auto& name : names) flowers.put("aster/" + name, png);
  const auto set = flowers.open();
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(set.file(static_cast<int64_t>(i)),
              std::filesystem::path(flowers.folder / "aster") / names[i]);
  }
}

TEST(ImageFolder, PngOfAllKinds) {
  const Folder folder;
  torch::manual_seed(3);
  const auto image = torch::randint(256, {5, 7, 4}, at::kByte);
  const auto read = [&](const at::Tensor& pixels, int64_t channels, int bits = 8) {
    write(folder / "x.png", png_of(pixels, bits));
    return read_image(folder / "x.png", channels);
  };
  const auto rgb = image.slice(2, 0, 3), grey = image.slice(2, 0, 1);
  EXPECT_TRUE(at::equal(read(rgb, 3), rgb));
  EXPECT_TRUE(at::equal(read(image, 3), rgb));  // alpha is left out
  EXPECT_TRUE(at::equal(read(grey, 1), grey));
  EXPECT_TRUE(at::equal(read(grey, 3), grey.expand({5, 7, 3})));
  EXPECT_TRUE(at::equal(read(image.slice(2, 0, 2), 1), grey));  // grey with alpha
  EXPECT_TRUE(at::equal(read(rgb, 3, 16), rgb));
  EXPECT_THAT(message_of<ConfigError>([&] { read_image(folder / "x.png", 2); }),
              HasSubstr("channels = 2"));
}

TEST(ImageFolder, CropsAndStretches) {
  const Flowers flowers;
  auto image = torch::zeros({4, 8, 3}, at::kByte);
  image.slice(1, 2, 6).fill_(255);            // the middle is white
  flowers.put("daisy/x.jpg", png_of(image));  // by its bytes, not by its name
  const ImageFolderOptions plain{.size = 4, .mean = {0, 0, 0}, .deviation = {1, 1, 1}};
  const auto read = [&](ImageFit fit) {
    auto options = plain;
    options.fit = fit;
    return flowers.open(options).get_batch({0}).data;
  };
  EXPECT_EQ(read(ImageFit::Crop).min().item<float>(), 1);
  EXPECT_LT(read(ImageFit::Stretch).select(3, 0).max().item<float>(), 0.5);
}

// What each of `to` pixels takes of `from`: a triangle as wide as two of them.
at::Tensor triangles(int64_t from, int64_t to) {
  const double scale = static_cast<double>(from) / static_cast<double>(to);
  const at::Tensor centres = (torch::arange(to, at::kDouble).unsqueeze(1) + 0.5) * scale;
  const at::Tensor places = torch::arange(from, at::kDouble) + 0.5;
  const at::Tensor weights = (1 - (places - centres).abs() / std::max(scale, 1.0)).clamp_min(0);
  return weights / weights.sum(1, /*keepdim=*/true);
}

// libtorch 2.15's own resizing makes other values of one column.
TEST(ImageFolder, ResizesToOneColumn) {
  isolated([] {
    const Flowers flowers;
    torch::manual_seed(5);
    for (const auto fit : {ImageFit::Crop, ImageFit::Stretch}) {
      for (const auto& [height, width] :
           {std::pair(8, 8), std::pair(40, 33), std::pair(3, 301), std::pair(301, 3)}) {
        const auto image = torch::randint(256, {height, width, 3}, at::kByte);
        flowers.put("daisy/x.jpg", png_of(image));
        const auto pixel =
            flowers.open({.size = 1, .fit = fit, .mean = {0, 0, 0}, .deviation = {1, 1, 1}})
                .get_batch({0})
                .data[0];
        const bool crops = fit == ImageFit::Crop;
        const int64_t rows = crops ? std::max(1, height / width) : 1;
        const int64_t columns = crops ? std::max(1, width / height) : 1;
        const auto all = triangles(height, rows)
                             .matmul(image.permute({2, 0, 1}).to(at::kDouble))
                             .matmul(triangles(width, columns).t());
        const auto middle = [](int64_t of) { return std::llrint(static_cast<double>(of - 1) / 2); };
        const auto wanted = all.select(1, middle(rows)).select(1, middle(columns)) / 255;
        EXPECT_TRUE(at::allclose(pixel.flatten().to(at::kDouble), wanted, 1e-5, 1e-5))
            << height << " x " << width << ": " << pixel.flatten() << wanted;
      }
    }
  });
}

// The whole of the last, resized, takes 1.8 GB. What is cut out has the bits of the whole.
TEST(ImageFolder, CropsLongImagesInLittleMemory) {
  isolated([] {
    const Flowers flowers;
    torch::manual_seed(4);
    const auto fit = [&](const at::Tensor& image, int64_t size) {
      flowers.put("daisy/x.jpg", png_of(image));
      return flowers.open({.size = size, .mean = {0, 0, 0}, .deviation = {1, 1, 1}})
          .get_batch({0})
          .data[0];
    };
    for (const auto& [height, width] : {std::pair(301, 3), std::pair(3, 301), std::pair(90, 1)}) {
      const auto image = torch::randint(256, {height, width, 3}, at::kByte);
      const bool is_wide = height < width;
      const int64_t longer = 4 * std::max(height, width) / std::min(height, width);
      const auto whole = at::_upsample_bilinear2d_aa(
          image.permute({2, 0, 1}).to(at::kFloat).unsqueeze(0),
          {is_wide ? 4 : longer, is_wide ? longer : 4}, /*align_corners=*/false)[0];
      EXPECT_TRUE(at::equal(fit(image, 4), whole.narrow(is_wide ? 2 : 1, longer / 2 - 2, 4) / 255))
          << height << " x " << width;
    }
    EXPECT_EQ(fit(torch::full({1, 3000, 3}, 255, at::kByte), 224).min().item<float>(), 1);
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    EXPECT_LT(usage.ru_maxrss, 1 << 20);  // KiB
  });
}

TEST(ImageFolder, DamagedImagesAreErrorsWithTheirFile) {
  const Flowers flowers;
  const std::string png = png_of(torch::randint(256, {20, 20, 3}, at::kByte));
  const std::string jpeg = jpeg_of(torch::randint(256, {20, 20, 3}, at::kByte));
  const auto refused = [&](const std::string& bytes) {
    flowers.put("rose/b.png", bytes);
    return message_of<DataError>([&] { flowers.open().get_batch({1}); });
  };
  EXPECT_THAT(refused(png.substr(0, png.size() / 2)),
              AllOf(HasSubstr("rose/b.png"), HasSubstr("damaged PNG: truncated")));
  EXPECT_THAT(refused(jpeg.substr(0, jpeg.size() / 2)),
              AllOf(HasSubstr("rose/b.png"), HasSubstr("damaged JPEG: Premature end")));
  std::string wrong = png;
  wrong[wrong.size() / 2] ^= 0x55;
  EXPECT_THAT(refused(wrong), HasSubstr("damaged PNG"));
  EXPECT_THAT(refused("GIF89a"), HasSubstr("is neither PNG nor JPEG"));
  EXPECT_THAT(refused(""), HasSubstr("is empty"));
  std::string huge = png;
  huge.replace(16, 8, std::string("\x00\x0f\x42\x40\x00\x0f\x42\x40", 8));
  EXPECT_THAT(refused(huge), HasSubstr("PNG"));  // the header's checksum is wrong, too

  Loader loader(flowers.open(), Shard{0, 1}, {.batch_size = 3, .shuffle = false, .workers = 2});
  EXPECT_THAT(message_of<DataError>([&] {
                for (const auto& batch : loader.epoch(0)) (void)batch;
              }),
              AllOf(HasSubstr("sample 1 cannot be read"), HasSubstr("rose/b.png")));
}

TEST(ImageFolder, DamagedImagesAreSkippedAndCounted) {
  const Flowers flowers;
  flowers.put("rose/a/deep.PNG", "nothing");
  const auto set = flowers.open({.size = 4, .bad_images = BadImages::Skip});
  EXPECT_EQ(set.size(), 2);
  EXPECT_EQ(set.skipped(), 1);
  EXPECT_THAT(set.first_skipped(), HasSubstr("deep.PNG: is neither"));
  EXPECT_TRUE(at::equal(set.get_batch({0, 1}).target, torch::tensor({0, 1})));
}

TEST(ImageFolder, ALinkToAFolderThatItLiesInIsRefused) {
  for (const auto& [link, target] :
       {std::pair("rose/self", "."), std::pair("rose/a/up", ".."), std::pair("all", ".")}) {
    const Flowers flowers;
    std::filesystem::create_directory_symlink(target, flowers.folder / link);
    std::filesystem::create_directory_symlink(target, flowers.folder / (link + std::string("2")));
    EXPECT_THAT(message_of<DataError>([&] { flowers.open(); }),
                AllOf(HasSubstr(link), HasSubstr("a folder that it lies in")));
  }
  const Flowers flowers;  // of other folders links are followed
  std::filesystem::create_directory_symlink("../daisy", flowers.folder / "rose/daisies");
  EXPECT_EQ(flowers.open().size(), 4);
  EXPECT_EQ(data::ImageFolder(flowers.folder / "daisy/..", {.size = 4}).size(), 4);
}

TEST(ImageFolder, ALinkThatLeadsNowhereIsAnImageThatCannotBeRead) {
  for (const char* target : {"link.png", "nowhere"}) {
    const Flowers flowers;
    std::filesystem::create_symlink(target, flowers.folder / "rose/link.png");
    ASSERT_EQ(flowers.open().size(), 4);
    EXPECT_THAT(message_of<DataError>([&] { flowers.open().get_batch({2}); }),
                HasSubstr("rose/link.png"));
    EXPECT_EQ(flowers.open({.size = 4, .bad_images = BadImages::Skip}).skipped(), 1);
  }
}

TEST(ImageFolder, ALinkToItselfInThePlaceOfAClassIsRefused) {
  const Flowers flowers;
  std::filesystem::create_symlink("tulip", flowers.folder / "tulip");
  EXPECT_THAT(message_of<DataError>([&] { flowers.open(); }),
              AllOf(HasSubstr("[image folder]"), HasSubstr("tulip: Too many levels")));
}

// Images are read later than they are listed.
TEST(ImageFolder, ARelativeFolderStaysWhenTheProgramChangesItsWorkingDirectory) {
  const Flowers flowers;
  spawn(1, [&](World&) {
    std::filesystem::current_path(flowers.folder.path());
    const data::ImageFolder images(".", {.size = 4});
    std::filesystem::current_path("/");
    EXPECT_TRUE(
        at::equal(images.get_batch({0, 1, 2}).data, flowers.open().get_batch({0, 1, 2}).data));
    EXPECT_TRUE(std::filesystem::exists(images.file(0)));
  });
}

TEST(ImageFolder, FoldersThatHaveNone) {
  const Folder folder;
  const auto refused = [&](const std::string& name, const ImageFolderOptions& options = {}) {
    return message_of<Error>([&] { data::ImageFolder(folder / name, options); });
  };
  EXPECT_THAT(refused("none"), HasSubstr("No such file"));
  EXPECT_THAT(refused(""), HasSubstr("has no sub-folders"));
  std::filesystem::create_directories(folder / "class");
  EXPECT_THAT(refused(""), HasSubstr("class has no .png, .jpg or .jpeg file"));
  EXPECT_THAT(refused("", {.classes = {"class"}}), HasSubstr("has no images"));
  EXPECT_THAT(refused("", {.size = 0}), HasSubstr("size = 0"));
  EXPECT_THAT(refused("", {.deviation = {0, 1, 1}}), HasSubstr("positive deviations"));
}

}  // namespace
}  // namespace lockstep::test
