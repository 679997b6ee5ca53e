// Files that are written beside others of the same name.
#include "lockstep/checkpoint/export.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <vector>

#include "checkpoint/format/conversion.h"
#include "checkpoint_format/small_checkpoint.h"
#include "lockstep/checkpoint/difference.h"
#include "lockstep/checkpoint/error.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/tensor_files.h"
#include "support/folder.h"
#include "support/thrown.h"
#include "support/tool.h"

namespace lockstep::test {
namespace {

using checkpoint::Existing;
using testing::AllOf;
using testing::HasSubstr;

std::vector<checkpoint::TensorToWrite> tensor_of(const std::vector<float>& values) {
  return {{"a", dtype("F32"), {static_cast<int64_t>(values.size())}, bytes_of(values)}};
}

// The second begins and ends while the first is asked for its bytes.
TEST(Export, TwoToOnePathAreWrittenApart) {
  const Folder folder;
  const std::string path = folder / "net.safetensors";
  const std::vector<float> ones(1000, 1), twos(2000, 2);
  auto first = tensor_of(ones);
  first[0].read = [&] {
    checkpoint::write_file(path, tensor_of(twos), {}, Existing::Replace);
    const checkpoint::Safetensors second(path);
    EXPECT_EQ(second.bytes(second.tensors().at("a")), bytes_of(twos));
    return bytes_of(ones);
  };
  checkpoint::write_file(path, first, {}, Existing::Replace);
  const checkpoint::Safetensors file(path);
  EXPECT_EQ(file.bytes(file.tensors().at("a")), bytes_of(ones));
  EXPECT_THAT(checkpoint::names_in(checkpoint::system_files(), folder.path()),
              testing::ElementsAre("net.safetensors"));
}

std::vector<uint16_t> narrowed(const std::vector<float>& values, const char* to) {
  const auto bytes = checkpoint::converted(bytes_of(values), "F32", dtype(to));
  std::vector<uint16_t> out(values.size());
  EXPECT_EQ(bytes.view().size(), 2 * out.size());
  std::memcpy(out.data(), bytes.view().data(), bytes.view().size());
  return out;
}

// The bits are those of at::Tensor::to().
TEST(Export, NarrowNumbersAreTheNearestAndOfTwoTheEvenOne) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(narrowed({1, 1.00390625F, 1.01171875F, -0.1F, -0.0F, kInfinity, -kInfinity, NAN,
                      3.3895313892515355e38F, 1e-40F},
                     "BF16"),
            (std::vector<uint16_t>{0x3f80, 0x3f80, 0x3f82, 0xbdcd, 0x8000, 0x7f80, 0xff80, 0x7fc0,
                                   0x7f7f, 0x0001}));
  EXPECT_EQ(narrowed({1, 1.00048828125F, 1.00146484375F, -0.1F, -0.0F, kInfinity, -kInfinity, NAN,
                      65519, 0x1p-14F, 0x1p-24F, 0x1p-25F, 0x1.8p-25F, 0x1.8p-24F, 1e-40F},
                     "F16"),
            (std::vector<uint16_t>{0x3c00, 0x3c00, 0x3c02, 0xae66, 0x8000, 0x7c00, 0xfc00, 0x7e00,
                                   0x7bff, 0x0400, 0x0001, 0x0000, 0x0001, 0x0002, 0x0000}));
}

TEST(Export, EachNarrowNumberComesBack) {
  for (const char* narrow : {"F16", "BF16"}) {
    std::vector<uint16_t> all;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) all.push_back(static_cast<uint16_t>(bits));
    for (const char* wide : {"F32", "F64"}) {
      const auto there = checkpoint::converted(bytes_of(all), narrow, dtype(wide));
      const auto back = checkpoint::converted(there.view(), wide, dtype(narrow));
      const auto found = checkpoint::difference(narrow, bytes_of(all), narrow, back.view());
      EXPECT_EQ(found.differ, 0) << narrow << " by " << wide;
      EXPECT_EQ(checkpoint::difference(narrow, bytes_of(all), wide, there.view()).differ, 0);
    }
  }
}

TEST(Export, WritesTensorsInAnotherDtypeAndUnderOtherNames) {
  const Folder folder;
  std::vector<float> wide{0.1F, 70000, 3};
  std::vector<int64_t> count{7};
  const std::string from = folder / "a.safetensors", to = folder / "b.safetensors";
  checkpoint::write_file(from,
                         {{"net/layers.0.w", dtype("F32"), {3}, bytes_of(wide)},
                          {"net/layers2", dtype("F32"), {3}, bytes_of(wide)},
                          {"net/count", dtype("I64"), {1}, bytes_of(count)}},
                         {{"net/tied", "net/layers.0.w"}}, Existing::Error);
  const auto run = [&](int status, const std::string& flags) {
    const auto outcome = lockstep_tool("export " + from + " --force --to " + to + " " + flags);
    EXPECT_EQ(outcome.status, status) << outcome.said;
    return outcome.said;
  };
  run(0, "--only net --dtype bf16 --rename layers=model.layers --rename tied=head");
  {
    const checkpoint::Safetensors file(to);
    EXPECT_THAT(file.tensors(), testing::ElementsAre(testing::Key("count"), testing::Key("layers2"),
                                                     testing::Key("model.layers.0.w")));
    const auto& tensor = file.tensors().at("model.layers.0.w");
    EXPECT_EQ(tensor.dtype.name(), "BF16");
    EXPECT_EQ(file.bytes(tensor), bytes_of(narrowed(wide, "BF16")));
    EXPECT_EQ(file.tensors().at("count").dtype.name(), "I64");
    EXPECT_EQ(file.bytes(file.tensors().at("count")), bytes_of(count));
    EXPECT_EQ(file.metadata().at("head"), "model.layers.0.w");
  }
  EXPECT_THAT(run(1, "--dtype fp16"), testing::HasSubstr("'net/layers.0.w': 70000 is beyond the "
                                                         "largest F16: choose a wider dtype"));
  run(0, "--rename net/=");
  EXPECT_TRUE(checkpoint::Safetensors(to).tensors().contains("layers2"));
  EXPECT_THAT(run(1, "--rename nett=x"), testing::HasSubstr("no tensor is called 'nett'"));
  EXPECT_THAT(run(1, "--rename net/count=net/layers2"),
              testing::HasSubstr("two tensors would be called 'net/layers2'"));
  EXPECT_THAT(run(1, "--rename net/count="), testing::HasSubstr("would have no name"));
  EXPECT_THAT(run(2, "--rename net"), testing::HasSubstr("--rename net: give OLD=NEW"));
  EXPECT_THAT(run(2, "--dtype int8"), testing::HasSubstr("--dtype"));
}

// As of a file of torch.save(tensor). It was left out of what is exported, shown and compared.
TEST(Export, ATensorWithoutANameIsATensor) {
  const Folder folder;
  const std::vector<float> values{1, 2, 3};
  const std::string from = folder / "a.safetensors", to = folder / "b.safetensors";
  checkpoint::write_file(from, {{"", dtype("F32"), {3}, bytes_of(values)}}, {}, Existing::Error);
  const auto files = checkpoint::open_tensors(from);
  const auto selected = checkpoint::renamed(checkpoint::select(*files, {}), {});
  checkpoint::write_file(to, checkpoint::to_write(*files, selected), {}, Existing::Error);
  const checkpoint::Safetensors file(to);
  ASSERT_THAT(file.tensors(), testing::ElementsAre(testing::Key("")));
  EXPECT_EQ(file.bytes(file.tensors().at("")), bytes_of(values));
  EXPECT_THROW(checkpoint::select(*files, {"net"}), CheckpointError);
}

// As an export of another rank begins with the removal of what a killed one has left.
TEST(Export, AnotherProcessOfTheSameFolderIsSuspectedOfRemovingItsFiles) {
  struct Shared : checkpoint::FileSystem {
    int rename(const std::string& from, const std::string& to) override {
      unlink(from);
      return FileSystem::rename(from, to);
    }
  } files;
  const Folder folder;
  EXPECT_THAT(message_of<CheckpointError>([&] {
                checkpoint::write_folder(folder / "net", tensor_of({1}), {}, Existing::Replace,
                                         files);
              }),
              AllOf(HasSubstr("cannot be renamed to " + folder / "net/model.safetensors"),
                    HasSubstr("another rank, write it at the same time? One rank has to)")));
}

// --to /dev/null --force, by root, replaced the machine's device by a file.
TEST(Export, APipeIsNotReplaced) {
  const Folder folder;
  const std::string pipe = folder / "net.safetensors";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const Existing existing : {Existing::Error, Existing::Replace}) {
    try {
      checkpoint::write_file(pipe, tensor_of({1}), {}, existing);
      ADD_FAILURE() << "was written";
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("which is not replaced: name a file"));
    }
    EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  }
  EXPECT_THAT(checkpoint::names_in(checkpoint::system_files(), folder.path()),
              testing::ElementsAre("net.safetensors"));
}

}  // namespace
}  // namespace lockstep::test
