// Files of torch.save: what is read, and that nothing else is.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "checkpoint/format/tensor_files/tensor_kinds.h"
#include "checkpoint_format/small_checkpoint.h"
#include "checkpoint_format/torch_zip.h"
#include "lockstep/checkpoint/error.h"
#include "support/folder.h"
#include "support/thrown.h"
#include "support/tool.h"

namespace lockstep::test {
namespace {

using checkpoint::open_tensors;
using checkpoint::parse_torch_file;
using testing::AllOf;
using testing::HasSubstr;
using Floats = std::vector<float>;

const Floats kSix{0, 1, 2, 3, 4, 5};

Records records_of(const std::string& pickle) {
  return {{"x/data.pkl", pickle}, {"x/data/0", std::string(bytes_of(kSix))}, {"x/version", "3\n"}};
}
std::string archive_of(const std::string& pickle) { return zip_of(records_of(pickle)); }

// What reading all of it says.
std::string fault_of_archive(const std::string& archive) {
  return message_of<CheckpointError>([&] {
    const auto file = parse_torch_file(archive, "[x] file");
    for (const auto& [name, tensor] : file->tensors()) file->read(name);
  });
}
std::string fault_of_pickle(const std::string& pickle) {
  return fault_of_archive(archive_of(pickle));
}

Floats floats(std::string_view bytes) {
  Floats values(bytes.size() / sizeof(float));
  std::copy_n(bytes.data(), bytes.size(), reinterpret_cast<char*>(values.data()));
  return values;
}

TEST(TorchFile, StridesOffsetsAndSharedStorages) {
  const std::string items = text("a") + tensor({2, 3}, {3, 1}) + text("b") +
                            tensor({3, 2}, {1, 3}) + text("c") + tensor({2}, {2}, 1) + text("d") +
                            tensor({}, {}, 5) + text("e") + tensor({2, 2}, {0, 1}, 4) + text("f") +
                            tensor({0, 4}, {4, 1}) + text("tied") + tensor({2, 3}, {3, 1});
  for (const bool zip64 : {false, true}) {
    const std::string archive = zip_of(records_of("\x80\x02}(" + items + "u."), zip64);
    const auto file = parse_torch_file(archive, "x");
    const auto values = [&](const char* name) { return floats(file->read(name).view()); };
    EXPECT_EQ(values("a"), kSix);
    EXPECT_EQ(values("b"), (Floats{0, 3, 1, 4, 2, 5}));
    EXPECT_EQ(values("c"), (Floats{1, 3}));
    EXPECT_EQ(values("d"), (Floats{5}));
    EXPECT_EQ(values("e"), (Floats{4, 5, 4, 5}));
    EXPECT_EQ(values("f"), Floats{});
    EXPECT_EQ(file->aliases(), (std::map<std::string, std::string>{{"tied", "a"}}));
    EXPECT_TRUE(file->verify().empty());
  }
}

TEST(TorchFile, NestedListsDictsAndScalars) {
  const std::string pickle = "\x80\x02}(" + text("list") + "](" + "K\x05" + "N" + "\x88" +
                             std::string("G\x3f\xf8\0\0\0\0\0\0", 9) + "e" + "K\x07" +
                             text("seven") + text("deep") + "}" + text("x") + "J\xff\xff\xff\xff" +
                             "s" + "u.";
  const std::string archive = archive_of(pickle);
  const auto file = parse_torch_file(archive, "x");
  EXPECT_EQ(file->values(), (checkpoint::Values{{"list.0", int64_t{5}},
                                                {"list.2", true},
                                                {"list.3", 1.5},
                                                {"7", std::string("seven")},
                                                {"deep.x", int64_t{-1}}}));
}

// Of MultiStepLR's state_dict(), and of configurations beside it.
TEST(TorchFile, CountersAndDevices) {
  const std::string counts = "}(" + whole_number(30) + "K\x01" + whole_number(60) + "K\x02" + "u";
  const std::string counter = global("collections", "Counter");
  const std::string device = global("torch", "device");
  const std::string archive =
      archive_of("\x80\x02}(" + text("milestones") + counter + counts + "\x85R" + text("none") +
                 counter + ")R" + text("cuda") + device + text("cuda") + "K\x01\x86R" +
                 text("cpu") + device + text("cpu") + "\x85R" + "u.");
  EXPECT_EQ(parse_torch_file(archive, "x")->values(),
            (checkpoint::Values{{"milestones.30", int64_t{1}},
                                {"milestones.60", int64_t{2}},
                                {"cuda", std::string("cuda:1")},
                                {"cpu", std::string("cpu")}}));
  EXPECT_THAT(fault_of_pickle(dict_of(counter + text("x") + "\x85R")),
              HasSubstr("a call of collections.Counter has no argument 0"));
  EXPECT_THAT(fault_of_pickle(dict_of(device + ")R")),
              HasSubstr("a call of torch.device has no argument 0"));
}

TEST(TorchFile, NothingIsExecutedAndWhatIsNotReadIsNamed) {
  const auto call = [](const char* module, const char* name) {
    return dict_of(global(module, name) + tuple(text("touch /tmp/x")) + "R");
  };
  EXPECT_THAT(fault_of_pickle(call("os", "system")),
              AllOf(HasSubstr("[x] file: x/data.pkl: 'os.system' is not read"),
                    HasSubstr("torch.save(net.state_dict(), FILE)")));
  EXPECT_THAT(fault_of_pickle(call("posix", "system")), HasSubstr("'posix.system' is not read"));
  EXPECT_THAT(fault_of_pickle(call("builtins", "eval")), HasSubstr("'builtins.eval' is not read"));
  EXPECT_THAT(fault_of_pickle(call("torch._utils", "_rebuild_sparse_tensor")),
              HasSubstr("'torch._utils._rebuild_sparse_tensor' is not read"));
  EXPECT_THAT(fault_of_pickle(dict_of(text("os") + text("system") + "\x93")),
              HasSubstr("'os.system' is not read"));
  EXPECT_THAT(fault_of_pickle(dict_of("ios\nsystem\n")), HasSubstr("opcode INST at byte"));
  EXPECT_THAT(fault_of_pickle(dict_of("\x8f")), HasSubstr("opcode EMPTY_SET at byte"));
  EXPECT_THAT(fault_of_pickle(dict_of("\x82\x01")), HasSubstr("opcode EXT1"));
  EXPECT_THAT(fault_of_pickle(dict_of(global("torch.nn.parameter", "Parameter") + ")\x81")),
              HasSubstr("an object of 'torch.nn.parameter.Parameter' is not read"));
  EXPECT_THAT(fault_of_pickle(dict_of(global("torch", "float32") + ")R")),
              HasSubstr("a call of torch.float32 is not known"));
  EXPECT_THAT(fault_of_pickle(dict_of(text("x") + ")R")),
              HasSubstr("calls what is not a function"));
}

TEST(TorchFile, HostilePicklesAreRefused) {
  EXPECT_THAT(fault_of_pickle(""), HasSubstr("is cut short"));
  EXPECT_THAT(fault_of_pickle("\x80\x06."), HasSubstr("protocol 6"));
  EXPECT_THAT(fault_of_pickle("\xff"), HasSubstr("is not a pickle: byte 0 is 0xff"));
  EXPECT_THAT(fault_of_pickle("."), HasSubstr("leaves more than one value"));
  EXPECT_THAT(fault_of_pickle("NN."), HasSubstr("leaves more than one value"));
  EXPECT_THAT(fault_of_pickle("(N."), HasSubstr("leaves more than one value"));
  EXPECT_THAT(fault_of_pickle("t."), HasSubstr("takes a mark that is not there"));
  EXPECT_THAT(fault_of_pickle("\x86."), HasSubstr("takes a value that is not there"));
  EXPECT_THAT(fault_of_pickle("N(a."), HasSubstr("takes a value that is not there"));
  EXPECT_THAT(fault_of_pickle("NNa."), HasSubstr("not a list or dict"));
  EXPECT_THAT(fault_of_pickle("}(Nu."), HasSubstr("a key without a value"));
  EXPECT_THAT(fault_of_pickle("}NNs."), HasSubstr("neither a text nor a whole number"));
  EXPECT_THAT(fault_of_pickle("h\x03."), HasSubstr("asks for value 3"));
  EXPECT_THAT(fault_of_pickle("X\xff\xff\xff\xff."), HasSubstr("is cut short"));
  EXPECT_THAT(fault_of_pickle("\x8a\x09"
                              "123456789."),
              HasSubstr("of 9 bytes is not read"));
  EXPECT_THAT(fault_of_pickle("cx"), HasSubstr("a name without an end"));
  // A list that contains itself, and one that has 2^60 elements.
  EXPECT_THAT(fault_of_pickle("]q" + std::string(1, '\0') + "h" + std::string(1, '\0') + "a."),
              HasSubstr("nested deeper than 64 levels"));
  std::string bomb = "N";
  for (int i = 0; i < 60; ++i) bomb += std::string("q") + "\x01" + "h" + "\x01" + "\x86";
  EXPECT_THAT(fault_of_pickle(bomb + "."), HasSubstr("refers to its parts too often"));
  // A list of 1,000 that is copied 10,000 times.
  std::string copies = "](";
  copies += std::string(1000, 'N') + "eq\x01";
  for (int i = 0; i < 10'000; ++i) copies += global("torch", "Size") + "h\x01\x85R";
  EXPECT_THAT(fault_of_pickle("(" + copies + "t."), HasSubstr("copies its parts too often"));
  const std::string twice =
      "}(" + text("a.b") + "K\x01" + text("a") + "}" + text("b") + "K\x02" + "s" + "u.";
  EXPECT_THAT(fault_of_pickle(twice), HasSubstr("two entries are called 'a.b'"));
}

TEST(TorchFile, HostileTensorsAreRefused) {
  const auto told = [](const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                       int64_t offset = 0, const std::string& key = "0") {
    return fault_of_pickle(dict_of(tensor(sizes, strides, offset, key)));
  };
  constexpr int64_t kMost = INT64_MAX;
  EXPECT_EQ(told({6}, {1}), "nothing");
  EXPECT_THAT(told({7}, {1}),
              HasSubstr("tensor 'a' reaches element 6 of record 'x/data/0', which has 6"));
  EXPECT_THAT(told({1}, {1}, 6), HasSubstr("reaches element 6"));
  EXPECT_THAT(told({1}, {1}, -1), HasSubstr("an offset below 0"));
  EXPECT_THAT(told({2}, {-1}, 1), HasSubstr("not whole numbers from 0"));
  EXPECT_THAT(told({2, 2}, {1}), HasSubstr("not one stride for each size"));
  EXPECT_THAT(told({kMost, kMost}, {0, 0}), HasSubstr("more bytes than 64 bits"));
  EXPECT_THAT(told({2, 2}, {kMost, kMost}), HasSubstr("more bytes than 64 bits"));
  EXPECT_THAT(told({2}, {1}, kMost), HasSubstr("more bytes than 64 bits"));
  EXPECT_THAT(told({int64_t{1} << 40}, {0}), HasSubstr("expanded to"));
  EXPECT_THAT(told({1}, {1}, 0, "1"), HasSubstr("is in record 'x/data/1', which is not there"));
  EXPECT_THAT(told({1}, {1}, 0, "../data.pkl"), HasSubstr("which is not there"));
  EXPECT_EQ(told({0, 4}, {kMost, kMost}, 0), "nothing");
}

// Each bit of an archive: the same tensors are read, or the archive is refused.
TEST(TorchFile, EveryBitMattersOrChangesNothing) {
  const std::string whole = archive_of(dict_of(tensor({2, 3}, {3, 1})));
  size_t refused = 0;
  for (size_t i = 0; i < whole.size() * 8; ++i) {
    std::string flipped = whole;
    flipped[i / 8] = static_cast<char>(flipped[i / 8] ^ 1 << i % 8);
    try {
      const auto file = parse_torch_file(flipped, "x");
      ASSERT_EQ(file->tensors().size(), 1u) << i;
      ASSERT_EQ(floats(file->read("a").view()), kSix) << i;
    } catch (const CheckpointError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, whole.size() * 8 / 2);
  for (size_t length = 0; length < whole.size(); ++length) {
    ASSERT_NE(fault_of_archive(whole.substr(0, length)), "nothing") << length;
  }
}

TEST(TorchFile, DamageNamesRecordAndTensor) {
  std::string archive = archive_of(dict_of(tensor({2, 3}, {3, 1})));
  archive[archive.find(bytes_of(kSix)) + 5] ^= 1;
  EXPECT_THAT(fault_of_archive(archive),
              HasSubstr("record 'x/data/0' of 'a' is damaged: it does not have the CRC-32"));
  EXPECT_THAT(parse_torch_file(archive, "x")->verify(),
              testing::ElementsAre(HasSubstr("of 'a' is damaged")));
}

TEST(TorchFile, ArchivesThatAreNotOfTorchSave) {
  EXPECT_THAT(fault_of_archive("PK"), HasSubstr("is cut short or no zip archive"));
  EXPECT_THAT(fault_of_archive(zip_of({})), HasSubstr("without a data.pkl"));
  EXPECT_THAT(fault_of_archive(zip_of({{"a/data.pkl", "N."}, {"b/data.pkl", "N."}})),
              HasSubstr("several data.pkl"));
  EXPECT_THAT(fault_of_archive(zip_of({{"a/x", ""}, {"a/x", ""}})),
              HasSubstr("record 'a/x' comes twice"));
  EXPECT_THAT(fault_of_archive(zip_of({{"a/data.pkl", "N."}, {"a/byteorder", "big"}})),
              HasSubstr("byte order 'big'"));
  EXPECT_THAT(fault_of_archive(zip_of({{"a/data.pkl", "N."}, {"a/byteorder", "\x1b[\xff"}})),
              HasSubstr("byte order '\\x1b[\\xff'"));
  std::string compressed = zip_of({{"a/data.pkl", "N."}, {"a/byteorder", "\xcb\xc9"}});
  compressed[compressed.find("a/byteorder") - 22] = 8;   // the method, in the record's head
  compressed[compressed.rfind("a/byteorder") - 36] = 8;  // and in the directory
  EXPECT_THAT(fault_of_archive(compressed), HasSubstr("record 'a/byteorder' is compressed"));
  const Folder folder;
  const auto told = [&](const std::string& bytes) {
    write(folder / "x", bytes);
    return message_of<CheckpointError>([&] { open_tensors(folder / "x"); });
  };
  EXPECT_THAT(told("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"),
              AllOf(HasSubstr("before 1.6"), HasSubstr("legacy")));
  EXPECT_THAT(told("\x80\x04N."), HasSubstr("is a Python pickle, but not a file of torch.save"));
}

// Written by the real torch.save: all dtypes, views, protocols, old layouts; the same bits as its
// own safetensors, and the other way round.
TEST(TorchFile, PythonsFilesAreReadBitForBit) {
  const Folder folder;
  ASSERT_EQ(std::system(fmt::format("{} {}/tests/checkpoint_format/torch_files.py {}",
                                    LOCKSTEP_PEERS_PYTHON, LOCKSTEP_SOURCE_DIR, folder.path())
                            .c_str()),
            0);
  const auto expected = open_tensors(folder / "expected.safetensors");
  ASSERT_GT(expected->tensors().size(), 25u);
  for (const char* name : {"new.pt", "protocol4.pt", "protocol5.pt", "old.pt", "nocrc.pt"}) {
    const auto file = open_tensors(folder / name);
    EXPECT_TRUE(file->verify().empty()) << name;
    size_t found = 0;
    for (const auto& [tensor, stored] : expected->tensors()) {
      const auto alias = file->aliases().find(tensor);
      const std::string& own = alias == file->aliases().end() ? tensor : alias->second;
      ASSERT_TRUE(file->tensors().contains(own)) << name << " " << tensor;
      EXPECT_EQ(file->read(own).view(), expected->read(tensor).view()) << name << " " << tensor;
      if (file->tensors().at(own).dtype != "C128") {
        EXPECT_EQ(file->tensors().at(own).dtype, stored.dtype) << tensor;
        EXPECT_EQ(file->tensors().at(own).sizes, stored.sizes) << tensor;
      }
      ++found;
    }
    EXPECT_EQ(found, file->tensors().size() + file->aliases().size()) << name;
    EXPECT_EQ(file->values().at("epoch"), checkpoint::Value(int64_t{7}));
    EXPECT_EQ(file->values().at("schedule.milestones.6"), checkpoint::Value(int64_t{1}));
    EXPECT_EQ(file->values().at("device"), checkpoint::Value(std::string("cuda:1")));
    EXPECT_EQ(file->values().at("optimizer.param_groups.0.lr"), checkpoint::Value(0.01));
    EXPECT_EQ(file->values().at("optimizer.param_groups.0.betas.1"), checkpoint::Value(0.999));
  }
  const auto script = open_tensors(folder / "script.pt");
  EXPECT_EQ(floats(script->read("fc.weight").view()),
            floats(expected->read("net.fc.weight").view()));
  EXPECT_THAT(message_of<CheckpointError>([&] { open_tensors(folder / "legacy.pt"); }),
              HasSubstr("legacy"));
  EXPECT_THAT(message_of<CheckpointError>([&] { open_tensors(folder / "module.pt"); }),
              HasSubstr("'torch.nn.modules.linear.Linear' is not read"));
  EXPECT_THAT(message_of<CheckpointError>([&] { open_tensors(folder / "evil.pt"); }),
              HasSubstr("'posix.system' is not read"));
  EXPECT_FALSE(std::filesystem::exists(folder / "executed"));
  // What the tool makes of it Python's safetensors opens, with the same bits.
  EXPECT_EQ(lockstep_tool(fmt::format("export {0}/new.pt --to {0}/ours.safetensors", folder.path()))
                .status,
            0);
  ASSERT_EQ(std::system(fmt::format("{} {}/tests/checkpoint_format/torch_files.py {} check",
                                    LOCKSTEP_PEERS_PYTHON, LOCKSTEP_SOURCE_DIR, folder.path())
                            .c_str()),
            0);
}

}  // namespace
}  // namespace lockstep::test
