// What a run holds out for evaluation of data that are ordered by class.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "data/image_files.h"
#include "lockstep/train/run.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/printed.h"

namespace lockstep::test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using train::RunConfig;

// Grey images of two classes, dark and light, in files whose order is that of the classes.
void write_images(const std::string& folder) {
  for (const auto& [name, grey, count] :
       {std::tuple("dark", 20, 30), std::tuple("light", 220, 10)}) {
    std::filesystem::create_directories(folder + "/" + name);
    for (int i = 0; i < count; ++i) {
      write(folder + "/" + name + "/" + std::to_string(100 + i) + ".png",
            png_of(torch::full({4, 4, 3}, grey + i, at::kByte)));
    }
  }
}

RunConfig run_of_images(const Folder& folder) {
  auto config = small_run(folder / "run");
  config.data = {.kind = "images",
                 .path = folder / "images",
                 .validation_fraction = 0.2,
                 .images = {.size = 4, .channels = 1}};
  config.training.epochs = 30;
  config.training.metrics = {"confusion_matrix"};
  return config;
}

json result_in(const Folder& folder) { return json::parse(contents(folder / "run/result.json")); }

// 6 dark and 2 light ones, and both are trained on.
TEST(HeldOut, OfImagesIsAShareOfEachClass) {
  const Folder folder;
  isolated([&] { write_images(folder / "images"); });
  const std::string text = printed(2, run_of_images(folder));
  EXPECT_THAT(text, HasSubstr("images: 32 samples, evaluated on 8"));
  const auto metrics = result_in(folder)["metrics"];
  EXPECT_EQ(metrics["accuracy"], 1.0);
  EXPECT_EQ(metrics["recall"], 1.0);  // a mean over the classes that there are
}

TEST(HeldOut, TheFirstImagesAreOfEachClassToo) {
  const Folder folder;
  isolated([&] { write_images(folder / "images"); });
  auto config = run_of_images(folder);
  config.data.validation_fraction = 0;
  config.data.validation_path = folder / "images";
  config.data.max_samples = 8;
  config.training.curriculum = {{.epochs = 10, .fraction = 0.5}};
  printed(2, config);
  EXPECT_EQ(result_in(folder)["metrics"]["accuracy"], 1.0);
}

// As the iris data set comes.
TEST(HeldOut, OfATableThatIsOrderedByClassIsRefused) {
  const Folder folder;
  std::string rows = "a,b,kind\n";
  for (int i = 0; i < 60; ++i) {
    rows += std::to_string(i % 7) + "," + std::to_string(i % 5) + ",kind" + std::to_string(i / 20) +
            "\n";
  }
  write(folder / "sorted.csv", rows);
  // Not in order.
  std::string mixed = "a,b,kind\n";
  for (int i = 0; i < 60; ++i) {
    mixed += std::to_string(i % 7) + "," + std::to_string(i % 5) + ",kind" +
             (i == 59 ? "9" : std::to_string(i % 3)) + "\n";
  }
  write(folder / "mixed.csv", mixed);
  auto config = small_run(folder / "run");
  config.data = {.kind = "csv",
                 .path = folder / "sorted.csv",
                 .validation_fraction = 0.2,
                 .csv = {.scaling = "standard", .classification = true}};
  config.training.metrics = {"accuracy"};
  spawn_bare(2, [&](int) {
    EXPECT_THAT(message_of<ConfigError>([&] { train::run(config); }),
                HasSubstr("holds out the last 12 of 60 samples, and they are ordered by class: all "
                          "those of one of the 3 classes are together"));
  });
  config.data.path = folder / "mixed.csv";
  EXPECT_THAT(printed(2, config), HasSubstr("csv: 48 samples, evaluated on 12"));
}

}  // namespace
}  // namespace lockstep::test
