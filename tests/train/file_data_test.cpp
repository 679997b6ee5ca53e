#include "lockstep/train/file_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

#include "lockstep/checkpoint/interchange.h"
#include "lockstep/core/error.h"
#include "lockstep/text/token_files.h"
#include "lockstep/text/tokenizer.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using testing::HasSubstr;
using train::DataConfig;
using train::open_file_data;

TEST(FileData, ATableWithScalingAndClasses) {
  const Folder folder;
  write(folder / "train.csv", "a,b,kind\n1,5,cat\n3,x,cat\n3,7,dog\n");
  write(folder / "test.csv", "a,b,kind\n2,6,dog\n");
  spawn(2, [&](World& world) {
    DataConfig config{.kind = "csv", .path = folder / "train.csv"};
    config.csv = {.scaling = "standard", .bad_rows = "skip", .classification = true};
    config.validation_path = folder / "test.csv";
    const auto all = open_file_data(config, world);
    EXPECT_EQ(all.classes, 2);
    ASSERT_EQ(all.training->size(), 2);
    const auto batch = all.training->get_batch({0, 1});
    EXPECT_TRUE(at::equal(batch.data, torch::tensor({{-1.0F, -1.0F}, {1.0F, 1.0F}})));
    EXPECT_TRUE(at::equal(batch.target, torch::tensor({0, 1})));
    const auto other = all.validation->get_batch({0});
    EXPECT_TRUE(at::equal(other.data, torch::zeros({1, 2})));
    EXPECT_EQ(other.target.item<int64_t>(), 1);
    all.scaler->restore(torch::zeros({2}), torch::ones({2}));  // as from a checkpoint
    EXPECT_EQ(all.training->get_batch({0}).data.sum().item<float>(), 6);
  });
}

TEST(FileData, TensorsInASafetensorsFile) {
  isolated([] {
    const Folder folder;
    torch::nn::Module set;
    set.register_buffer("x", torch::rand({3, 2}));
    set.register_buffer("y", torch::tensor({0, 2, 1}));
    set.register_buffer("column", torch::tensor({{0}, {2}, {1}}));
    save_safetensors(set, folder / "set.safetensors");
    DataConfig config{.kind = "safetensors", .path = folder / "set.safetensors"};
    config.inputs_key = "x";
    config.targets_key = "y";
    const auto all = open_file_data(config, World::solo());
    EXPECT_EQ(all.training->size(), 3);
    EXPECT_EQ(all.classes, 3);
    EXPECT_EQ(all.validation, nullptr);
    // The same numbers, which loss: auto takes for classes, too.
    config.targets_key = "column";
    const auto column = open_file_data(config, World::solo());
    EXPECT_EQ(column.classes, 3);
    EXPECT_TRUE(at::equal(column.training->get_batch({0, 1, 2}).target, torch::tensor({0, 2, 1})));
  });
}

TEST(FileData, FurtherTablesHaveTheColumnsAndClassesOfTheFirst) {
  isolated([] {
    const Folder folder;
    write(folder / "train.csv", "a,b,kind\n1,5,cat\n3,7,dog\n");
    write(folder / "swapped.csv", "b,a,kind\n5,1,dog\n");
    write(folder / "last.csv", "a,kind,b\n1,dog,5\n");
    write(folder / "moved.csv", "a,kind,b\n1,0,5\n");
    write(folder / "dogs.csv", "a,b,kind\n1,5,dog\n");
    DataConfig config{.kind = "csv", .path = folder / "train.csv"};
    config.csv.classification = true;
    const auto target = [&](const std::string& name) {
      config.validation_path = folder / name;
      return open_file_data(config, World::solo()).validation->get_batch({0});
    };
    const auto refused = [&](const std::string& name) {
      return message_of<DataError>([&] { target(name); });
    };
    EXPECT_EQ(target("dogs.csv").target.item<int64_t>(), 1);
    EXPECT_THAT(refused("swapped.csv"),
                testing::AllOf(HasSubstr("swapped.csv has the features b, a, and "),
                               HasSubstr("train.csv has a, b: name them in data.features")));
    EXPECT_THAT(refused("moved.csv"),
                HasSubstr("moved.csv:2: column 'b' (2): '5' is not a known class"));
    config.csv.features = {"a", "b"};
    config.csv.targets = {"kind"};
    EXPECT_TRUE(at::equal(target("swapped.csv").data, torch::tensor({{1.0F, 5.0F}})));
    EXPECT_TRUE(at::equal(target("last.csv").data, torch::tensor({{1.0F, 5.0F}})));
    // Which would number the classes again.
    write(folder / "numbers.csv", "a,b,kind\n1,5,0\n1,5,1\n1,5,2\n");
    write(folder / "damaged.csv", "a,b,kind\n1,5,1\n1,5,x\n");
    config.path = folder / "numbers.csv";
    EXPECT_THAT(refused("damaged.csv"), HasSubstr("its classes are 1, x, and those of "));
  });
}

// The first row of a file without a header is lost to one.
TEST(FileData, AFirstLineOfNumbersIsWarnedOf) {
  isolated([] {
    const Folder folder;
    const auto said = [&](const std::string& first, bool header = true) {
      write(folder / "t.csv", first + "\n1,2,0\n3,4,1\n");
      DataConfig config{.kind = "csv", .path = folder / "t.csv"};
      config.csv.header = header;
      testing::internal::CaptureStderr();
      open_file_data(config, World::solo());
      return testing::internal::GetCapturedStderr();
    };
    EXPECT_THAT(said("5.5,7,1"), HasSubstr("are numbers (5.5, 7, 1); if that line is a row, say "
                                           "data.header: false"));
    EXPECT_THAT(said("5,0,0"), HasSubstr("are numbers (5, 0, 0)"));
    EXPECT_EQ(said("0,1,2"), "");  // numbered, as pandas does
    EXPECT_EQ(said("a,b,1.5"), "");
    EXPECT_EQ(said("5.5,7,1", false), "");
  });
}

TEST(FileData, WhatIsMissingIsNamed) {
  isolated([] {
    const auto refused = [](const DataConfig& config) {
      return message_of<Error>([&] { open_file_data(config, World::solo()); });
    };
    EXPECT_THAT(refused({.kind = "npy", .path = "x.npy"}),
                HasSubstr("data.targets_path is missing: data of kind npy lie in files"));
    EXPECT_THAT(refused({.kind = "images"}), HasSubstr("data.path is missing"));
    EXPECT_THAT(refused({.kind = "idx", .path = "/none", .targets_path = "/none"}),
                HasSubstr("[idx] /none"));
    EXPECT_THAT(refused({.kind = "mnist"}), HasSubstr("data.kind = mnist"));
    EXPECT_TRUE(train::is_file_data("csv"));
    EXPECT_TRUE(train::is_file_data("tokens"));
    EXPECT_FALSE(train::is_file_data("mnist"));
  });
}

// It is read later, by a name that says what is wrong.
TEST(FileData, ATokenizerThatCannotBeLookedAtIsThere) {
  isolated([] {
    const Folder folder;
    text::TokenWriter writer(folder.path(), {.vocabulary = 10, .separator = 0});
    writer.add(std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7, 8});
    writer.finish();
    std::filesystem::create_symlink("tokenizer.json", folder / "tokenizer.json");
    DataConfig config{.kind = "tokens", .path = folder.path()};
    config.tokens.sequence_length = 4;
    const auto data = open_file_data(config, World::solo());
    EXPECT_EQ(data.tokenizer, folder.path());
    EXPECT_THAT(message_of<DataError>([&] { text::Tokenizer::from_file(data.tokenizer); }),
                HasSubstr("Too many levels of symbolic links"));
  });
}

}  // namespace
}  // namespace lockstep::test
