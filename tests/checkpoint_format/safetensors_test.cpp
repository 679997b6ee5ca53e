#include "lockstep/checkpoint/safetensors.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "checkpoint/format/checksum.h"
#include "checkpoint_format/small_checkpoint.h"
#include "lockstep/checkpoint/error.h"
#include "lockstep/checkpoint/tensor_files.h"
#include "support/folder.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::parse_safetensors;
using checkpoint::Safetensors;
using checkpoint::write_safetensors;
using testing::HasSubstr;

TEST(Safetensors, WhatIsWrittenIsRead) {
  const Folder folder;
  const std::vector<float> a{1, 2, 3, 4, 5, 6};
  const std::vector<double> b{7};
  const std::vector<uint8_t> c{1, 0, 1};
  const auto written = write_safetensors(folder / "x",
                                         {{"c", dtype("BOOL"), {3}, bytes_of(c)},
                                          {"a", dtype("F32"), {2, 3}, bytes_of(a)},
                                          {"b/\"\n", dtype("F64"), {}, bytes_of(b)},
                                          {"none", dtype("I64"), {0, 5}, {}}},
                                         {{"step", "3"}});
  const Safetensors file(folder / "x");
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"step", "3"}}));
  ASSERT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.bytes(file.tensors().at("a")), bytes_of(a));
  EXPECT_EQ(file.bytes(file.tensors().at("b/\"\n")), bytes_of(b));
  EXPECT_EQ(file.bytes(file.tensors().at("c")), bytes_of(c));
  EXPECT_EQ(file.bytes(file.tensors().at("none")), "");
  EXPECT_EQ(file.tensors().at("a").sizes, (checkpoint::Sizes{2, 3}));
  EXPECT_EQ(file.tensors().at("b/\"\n").begin % 64, 0);
  EXPECT_EQ(static_cast<size_t>(written.bytes), contents(folder / "x").size());
  EXPECT_EQ(written.checksum, checkpoint::checksum(contents(folder / "x")));
  EXPECT_EQ(written.tensors.at("a"), checkpoint::checksum(bytes_of(a)));
}

// The disk begins with a large file before fsync, in the order of the file.
TEST(Safetensors, WritingBeginsWhileMoreFollows) {
  struct Watched : checkpoint::FileSystem {
    void begin_writing(int, int64_t offset, int64_t bytes) override {
      EXPECT_EQ(offset, begun);
      EXPECT_GT(bytes, 0);
      begun = offset + bytes;
      EXPECT_LE(begun, written);
    }
    ssize_t write(int fd, const char* bytes, size_t count) override {
      const ssize_t done = FileSystem::write(fd, bytes, count);
      written += done;
      return done;
    }
    int64_t begun = 0, written = 0;
  } files;
  const Folder folder;
  const std::vector<uint8_t> bytes(20 << 20, 7);
  const auto size = static_cast<int64_t>(bytes.size());
  write_safetensors(folder / "x", {{"a", dtype("U8"), {size}, bytes_of(bytes)}}, {}, files);
  EXPECT_EQ(files.written, static_cast<int64_t>(std::filesystem::file_size(folder / "x")));
  EXPECT_GT(files.begun, size / 2);
}

// The checksum is the one that other programs compute: XXH3-64 of no bytes, and of "a".
TEST(Safetensors, ChecksumsAreXxh3) {
  EXPECT_EQ(checkpoint::hex(checkpoint::checksum("")), "2d06800538d394c2");
  EXPECT_EQ(checkpoint::hex(checkpoint::checksum("a")), "e6c632b61e964e1f");
  EXPECT_EQ(checkpoint::from_hex("e6c632b61e964e1f"), 0xe6c632b61e964e1f);
  EXPECT_EQ(checkpoint::from_hex("E6c632b61e964e1f"), std::nullopt);
}

TEST(Safetensors, PythonReadsAllDtypesAndWritesForUs) {
  const Folder folder;
  std::vector<char> bytes(24);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i % 2);
  std::vector<checkpoint::TensorToWrite> tensors;
  for (const char* name : {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16",
                           "I32", "U32", "F32", "I64", "U64", "F64"}) {
    tensors.push_back({name, dtype(name), {24 / dtype(name).bytes()}, bytes_of(bytes)});
  }
  write_safetensors(folder / "ours", tensors);
  const std::string program = fmt::format(
      "import torch; from safetensors.torch import load_file, save_file\n"
      "t = load_file('{0}/ours')\n"
      "assert len(t) == 15, t.keys()\n"
      "for x in t.values(): assert bytes(x.view(torch.uint8).tolist()) == bytes([0, 1] * 12), x\n"
      "save_file(t, '{0}/theirs')\n",
      folder.path());
  ASSERT_EQ(std::system(fmt::format("{} -c \"{}\"", LOCKSTEP_PEERS_PYTHON, program).c_str()), 0);
  const Safetensors theirs(folder / "theirs");
  ASSERT_EQ(theirs.tensors().size(), tensors.size());
  for (const auto& tensor : tensors) {
    const auto& read = theirs.tensors().at(tensor.name);
    EXPECT_EQ(read.dtype, tensor.dtype);
    EXPECT_EQ(read.sizes, tensor.sizes);
    EXPECT_EQ(theirs.bytes(read), tensor.bytes);
  }
}

std::string file_of(const std::string& header, size_t data_bytes) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i));
  return bytes + header + std::string(data_bytes, 'x');
}

std::string fault_of_header(const std::string& bytes) {
  return message_of<CheckpointError>(
      [&] { parse_safetensors(bytes, static_cast<int64_t>(bytes.size()), "[x] file"); });
}

std::string fault_of_tensor(const std::string& tensor, size_t data_bytes = 4) {
  return fault_of_header(file_of("{\"a\":" + tensor + "}", data_bytes));
}

TEST(Safetensors, HostileHeadersAreRefusedByName) {
  const std::string good = R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  EXPECT_EQ(fault_of_tensor(good), "nothing");
  EXPECT_EQ(fault_of_header(file_of("{}", 0)), "nothing");
  EXPECT_THAT(fault_of_header(""), HasSubstr("[x] file: is 0 bytes long"));
  EXPECT_THAT(fault_of_header(std::string(8, '\xff')), HasSubstr("more than 100000000 bytes"));
  EXPECT_THAT(fault_of_header(std::string("\x09\0\0\0\0\0\0\0{}", 10)), HasSubstr("is cut short"));
  EXPECT_THAT(fault_of_header(file_of("[]", 0)), HasSubstr("not a JSON object"));
  EXPECT_THAT(fault_of_header(file_of("{", 0)), HasSubstr("is not JSON"));
  EXPECT_THAT(fault_of_header(file_of(std::string(100000, '['), 0)), HasSubstr("nested deeper"));
  EXPECT_THAT(fault_of_header(file_of("{\"a\":" + good + ",\"a\":" + good + "}", 4)),
              HasSubstr("'a' comes twice"));
  EXPECT_THAT(fault_of_tensor(good, 3), HasSubstr("cut short"));
  EXPECT_THAT(fault_of_tensor(good, 5), HasSubstr("too long"));
  EXPECT_THAT(fault_of_tensor(R"({"dtype":"F3","shape":[1],"data_offsets":[0,4]})"),
              HasSubstr("tensor 'a' has the unknown dtype 'F3'"));
  EXPECT_THAT(fault_of_tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})"),
              HasSubstr("make 8 bytes"));
  EXPECT_THAT(fault_of_tensor(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})"),
              HasSubstr("not a whole number"));
  EXPECT_THAT(fault_of_tensor(R"({"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})"),
              HasSubstr("not a whole number"));
  EXPECT_THAT(
      fault_of_tensor(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]})"),
      HasSubstr("more bytes than 64 bits"));
  EXPECT_THAT(fault_of_tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})", 8),
              HasSubstr("begins at 4, where 0 is expected"));
  EXPECT_THAT(fault_of_tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[8,4]})", 8),
              HasSubstr("data_offsets [8, 4]"));
  EXPECT_THAT(fault_of_tensor(R"({"dtype":"F32","shape":[1]})"), HasSubstr("is not described"));
  EXPECT_THAT(fault_of_tensor("3"), HasSubstr("is not described"));
  EXPECT_THAT(fault_of_header(file_of(R"({"__metadata__":{"a":1}})", 0)),
              HasSubstr("not only strings"));
  EXPECT_EQ(fault_of_header(file_of(R"({"__metadata__":null})", 0)), "nothing");
  for (const std::string& other : {std::string("\xef\xbb\xbf{}"), std::string("{}\0{", 4)}) {
    EXPECT_THAT(fault_of_header(file_of(other, 0)), HasSubstr("not a JSON object"));
  }
  EXPECT_THAT(fault_of_header(file_of("{\"a\":" + good + ",\"b\":" + good + "}", 4)),
              HasSubstr("tensor 'b' begins at 0, where 4"));
}

TEST(Safetensors, ANameThatComesTwiceOrIsNoTextIsRefused) {
  const Folder folder;
  const std::vector<float> a{1};
  const auto fault_of_names = [&](const std::string& one, const std::string& two) {
    return message_of<CheckpointError>([&] {
      write_safetensors(folder / "x", {{one, dtype("F32"), {1}, bytes_of(a)},
                                       {two, dtype("F32"), {1}, bytes_of(a)}});
    });
  };
  EXPECT_THAT(fault_of_names("a", "a"), HasSubstr("'a' comes twice"));
  EXPECT_THAT(fault_of_names("a", "\xff"), HasSubstr("not UTF-8"));
}

TEST(Safetensors, NamesThatTheFileCannotHaveOrDoesNotHave) {
  const Folder folder;
  const std::vector<float> a{1};
  EXPECT_THAT(message_of<CheckpointError>([&] {
                write_safetensors(folder / "y", {{"__metadata__", dtype("F32"), {1}, bytes_of(a)}});
              }),
              HasSubstr("cannot be called __metadata__"));
  write_safetensors(folder / "x", {{"a", dtype("F32"), {1}, bytes_of(a)}});
  const auto files = checkpoint::open_tensors(folder / "x");
  EXPECT_EQ(files->read("a").view(), bytes_of(a));
  EXPECT_THAT(message_of<CheckpointError>([&] { files->read("b"); }),
              HasSubstr("x has no tensor 'b'"));
}

}  // namespace
}  // namespace lockstep::test
