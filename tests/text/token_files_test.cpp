#include "lockstep/text/token_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>

#include "lockstep/core/error.h"
#include "lockstep/text/tokenizer.h"
#include "support/folder.h"
#include "support/thrown.h"
#include "text/files.h"

namespace lockstep::test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using text::TokenFiles;
using text::TokenWriter;
using text::write_file;

std::vector<int64_t> all_of(const TokenFiles& files, size_t shard) {
  std::vector<int64_t> out(static_cast<size_t>(files.tokens(shard)));
  files.read(shard, 0, out);
  return out;
}

TEST(TokenFiles, DocumentsComeBackWithTheirSeparatorsInFilesOfTheSize) {
  const Folder folder;
  for (const int64_t vocabulary : {300, 100'000}) {
    const std::string path = folder / std::to_string(vocabulary);
    TokenWriter writer(path, {.vocabulary = vocabulary, .separator = 7, .shard_tokens = 5});
    const auto last = static_cast<int32_t>(vocabulary - 1);
    writer.add(std::vector<int32_t>{1, 2});
    writer.add(std::vector<int32_t>{});
    writer.add(std::vector<int32_t>{3, last});
    writer.add(std::vector<int32_t>{4});
    EXPECT_EQ(writer.finish(), 9);
    const auto files = TokenFiles::open(path);
    ASSERT_EQ(files.shards(), 2u);
    EXPECT_THAT(all_of(files, 0), ElementsAre(1, 2, 7, 7, 3, last, 7));
    EXPECT_THAT(all_of(files, 1), ElementsAre(4, 7));
    EXPECT_EQ(files.vocabulary(), vocabulary);
    EXPECT_EQ(files.separator(), 7);
    EXPECT_EQ(std::filesystem::file_size(path + "/00001.bin"), vocabulary == 300 ? 4u : 8u);
  }
}

// Files are made one after the other.
TEST(TokenFiles, ARelativeFolderStaysWhenTheProgramChangesItsWorkingDirectory) {
  const Folder folder;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  TokenWriter writer("tokens", {.vocabulary = 300, .shard_tokens = 1});
  writer.add(std::vector<int32_t>{1});
  std::filesystem::current_path(before);
  writer.add(std::vector<int32_t>{2});
  writer.finish();
  const auto files = TokenFiles::open(folder / "tokens");
  ASSERT_EQ(files.shards(), 2u);
  EXPECT_THAT(all_of(files, 1), ElementsAre(2, 0));
}

TEST(TokenFiles, ASingleFileOfEachType) {
  const Folder folder;
  write_file(folder / "x.bin", std::string("\x01\x00\x02\x00\xff\xff\x00\x80", 8));
  EXPECT_THAT(all_of(TokenFiles::open(folder / "x.bin"), 0), ElementsAre(1, 2, 65535, 32768));
  EXPECT_THAT(all_of(TokenFiles::open(folder / "x.bin", text::token_type("uint32")), 0),
              ElementsAre(131073, 0x8000ffff));
  const auto signed_ones = TokenFiles::open(folder / "x.bin", text::token_type("int32"));
  EXPECT_THAT(message_of<DataError>([&] { all_of(signed_ones, 0); }),
              HasSubstr("x.bin: the token -2147418113 at 1"));
  write_file(folder / "odd.bin", "abc");
  EXPECT_THAT(message_of<DataError>([&] { TokenFiles::open(folder / "odd.bin"); }),
              HasSubstr("3 bytes"));
  EXPECT_THAT(message_of<ConfigError>([] { text::token_type("uint8"); }), HasSubstr("'uint8'"));
}

TEST(TokenFiles, DamageIsNamed) {
  const Folder folder;
  const auto opened = [&] {
    return message_of<DataError>([&] { TokenFiles::open(folder.path()); });
  };
  EXPECT_THAT(opened(), AllOf(HasSubstr("tokens.json: cannot be opened"),
                              HasSubstr("`lockstep tokenize FILES --to FOLDER`")));
  const auto index = [&](const std::string& text) { write_file(folder / "tokens.json", text); };
  index("{}");
  EXPECT_THAT(opened(), HasSubstr("is not \"lockstep.tokens\""));
  const std::string head =
      R"({"format": "lockstep.tokens", "version": 1, "dtype": "uint16", "vocabulary": 9, "separator": 0, "shards": )";
  index(head + R"([{"file": "../x", "tokens": 1}]})");
  EXPECT_THAT(opened(), HasSubstr("no file name of this folder"));
  index(head + R"([{"file": "a.bin", "tokens": 2}]})");
  EXPECT_THAT(opened(), HasSubstr("a.bin: cannot be opened"));
  write_file(folder / "a.bin", std::string("\x01\x00", 2));
  EXPECT_THAT(opened(), HasSubstr("it has 2 bytes; 2 tokens of uint16 are wanted"));
  write_file(folder / "a.bin", std::string("\x01\x00\x09\x00", 4));
  EXPECT_THAT(message_of<DataError>([&] { all_of(TokenFiles::open(folder.path()), 0); }),
              HasSubstr("the token 9 at 1 is outside the vocabulary of 9"));
  EXPECT_THAT(message_of<ConfigError>([&] { TokenWriter(folder.path(), {.vocabulary = 5}); }),
              HasSubstr("already"));
  EXPECT_THAT(message_of<DataError>([&] {
                TokenWriter(folder / "new", {.vocabulary = 5}).add(std::vector<int32_t>{5});
              }),
              HasSubstr("the token 5; the vocabulary is 5"));
}

TEST(Tokenize, MakesAFolderThatGivesTheTextBack) {
  const Folder folder;
  std::filesystem::create_directory(folder / "texts");
  const std::string first = "the cat sat on the mat <|endoftext|> the cat",
                    second = "\u00e9t\u00e9\n\nthe end\n";
  write_file(folder / "texts/a.txt", first);
  write_file(folder / "texts/b.txt", second);
  const std::string command = LOCKSTEP_BINARY_DIR "/bin/lockstep tokenize " + folder / "texts" +
                              " --vocabulary 280 --to " + folder / "corpus";
  ASSERT_EQ(std::system((command + " >/dev/null").c_str()), 0);
  const auto tokenizer = Tokenizer::from_file(folder / "corpus");
  const auto files = TokenFiles::open(folder / "corpus");
  std::string text;
  for (const int64_t id : all_of(files, 0)) text += tokenizer.bytes_of(static_cast<int32_t>(id));
  EXPECT_EQ(text, first + "<|endoftext|>" + second + "<|endoftext|>");
  EXPECT_NE(std::system((command + " 2>/dev/null").c_str()), 0);  // it is there already
}

// A pipe gives its text once, and it is needed twice: for the tokenizer and for the tokens.
TEST(Tokenize, TakesTheTextOfAPipe) {
  const Folder folder;
  const std::string text = "the cat sat on the mat, the cat sat";
  write_file(folder / "a.txt", text);
  const std::string command = "cat " + folder / "a.txt" +
                              " | " LOCKSTEP_BINARY_DIR
                              "/bin/lockstep tokenize /dev/stdin --vocabulary 280 --to " +
                              folder / "corpus" + " > /dev/null";
  ASSERT_EQ(std::system(command.c_str()), 0);
  const auto tokenizer = Tokenizer::from_file(folder / "corpus");
  std::string back;
  for (const int64_t id : all_of(TokenFiles::open(folder / "corpus"), 0)) {
    back += tokenizer.bytes_of(static_cast<int32_t>(id));
  }
  EXPECT_EQ(back, text + "<|endoftext|>");
}

// A wrong folder is told here, and not by the training that follows.
TEST(Tokenize, RefusesToMakeNothing) {
  const Folder folder;
  std::filesystem::create_directory(folder / "none");
  write_file(folder / "empty.txt", "");
  for (const char* texts : {"none", "empty.txt", "missing.txt"}) {
    const std::string corpus = folder / ("of-" + std::string(texts));
    const std::string command = LOCKSTEP_BINARY_DIR "/bin/lockstep tokenize " + folder / texts +
                                " --to " + corpus + " > /dev/null 2>&1";
    EXPECT_NE(std::system(command.c_str()), 0) << texts;
    EXPECT_FALSE(std::filesystem::exists(corpus + "/tokens.json")) << texts;
  }
}

TEST(TokenFiles, APathThatCannotBeIsADataError) {
  const std::string path = "/tmp/" + std::string(300, 'x');
  EXPECT_THAT(message_of<DataError>([&] { TokenFiles::open(path); }),
              HasSubstr("File name too long"));
  EXPECT_THAT(message_of<DataError>([&] { TokenWriter(path, {.vocabulary = 9}); }),
              HasSubstr("File name too long"));
}

TEST(TokenFiles, APipeIsNoFile) {
  const Folder folder;
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(message_of<DataError>([&] { TokenFiles::open(folder / "pipe"); }),
              HasSubstr("pipe: this is not a regular file"));
}

}  // namespace
}  // namespace lockstep::test
