#include "lockstep/text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/text/tokenizer_trainer.h"
#include "support/thrown.h"
#include "text/peer.h"

namespace lockstep::test {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Lt;
using text::AddedToken;
using text::TextStream;
using text::Tokenizer;
using text::train_tokenizer;

using Ids = std::vector<int32_t>;

Tokenizer small() {
  return train_tokenizer(
      {"low lower lowest \u00e9t\u00e9 low \u00e9t\u00e9", "new newer newest low"},
      {.vocabulary = 268, .added = {{"<|end|>"}, {"<t>", false}}});
}

TEST(QwenTokenizer, NumbersThatEverybodyKnows) {
  const auto qwen = Tokenizer::from_tiktoken(qwen_ranks());
  EXPECT_EQ(qwen.size(), 151669);
  EXPECT_EQ(qwen.encode("You are a helpful assistant."), (Ids{2610, 525, 264, 10950, 17847, 13}));
  EXPECT_EQ(qwen.encode("<|im_start|>assistant\n"), (Ids{151644, 77091, 198}));
  EXPECT_EQ(qwen.encode("<think>\n\n</think>\n\n"), (Ids{151667, 271, 151668, 271}));
  EXPECT_EQ(qwen.id_of("<|im_end|>"), 151645);
  EXPECT_TRUE(qwen.is_special(151645));
  EXPECT_FALSE(qwen.is_special(151667));
}

TEST(Tokenizer, BytesThatAreNoTextComeBack) {
  const auto tokenizer = small();
  const std::string text = "low \xff\xfe\xc3 \xe2\x82 x\xf0\x9f";
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  EXPECT_THAT(tokenizer.encode(""), ElementsAre());
  EXPECT_EQ(tokenizer.decode({}), "");
}

TEST(Tokenizer, LongWordsAreMergedAsShortOnes) {
  const auto tokenizer = small();
  std::string text;
  Ids expected;
  const Ids one = tokenizer.encode("lowest");
  for (int i = 0; i < 50; ++i) text += "lowest";  // one word of 300 letters
  const Ids ids = tokenizer.encode(text);
  EXPECT_EQ(tokenizer.decode(ids), text);
  // What is merged at a seam is merged at each.
  EXPECT_LE(ids.size(), 50 * one.size());
  const Ids seam = tokenizer.encode("lowestlowest");
  EXPECT_EQ(ids.size(), one.size() + 49 * (seam.size() - one.size()));
}

TEST(Tokenizer, ItsFileIsReadBack) {
  const auto tokenizer = small();
  const auto again = Tokenizer::from_json(tokenizer.to_json());
  EXPECT_EQ(again.to_json(), tokenizer.to_json());
  EXPECT_EQ(again.encode("lowest new\u00e9t\u00e9<t>"),
            tokenizer.encode("lowest new\u00e9t\u00e9<t>"));
  EXPECT_EQ(again.added_tokens(), tokenizer.added_tokens());
}

TEST(Tokenizer, AddedTokensTheLongestFirst) {
  const auto tokenizer = train_tokenizer(
      {"x"}, {.vocabulary = 300, .added = {{"<a"}, {"<a>b"}, {"<a>", false}, {"\u00e9"}}});
  const auto id = [&](std::string_view text) { return tokenizer.id_of(text).value(); };
  EXPECT_EQ(tokenizer.encode("<a><a>b<a\u00e9"),
            (Ids{id("<a>"), id("<a>b"), id("<a"), id("\u00e9")}));
  // Not special ones are always found; before normalisation.
  EXPECT_EQ(tokenizer.encode("<a>", {.special = false}), (Ids{id("<a>")}));
  EXPECT_EQ(tokenizer.encode("<a><a", {.special = false, .added = false}).size(), 5U);
  EXPECT_EQ(tokenizer.encode("<a>b", {.added = false}), (Ids{id("<a>b")}));
  // What is text is so as a whole, as in `tokenizers`.
  EXPECT_EQ(tokenizer.encode("<a>", {.added = false}).size(), 3U);
  EXPECT_EQ(tokenizer.encode("<a>b", {.special = false}).size(), 4U);
  EXPECT_NE(tokenizer.encode("e\u0301"), (Ids{id("\u00e9")}));
}

TEST(Tokenizer, ManyThreadsMayUseOne) {
  const auto tokenizer = small();
  const std::string text = "low lower newest \u00e9t\u00e9 new lowest";
  const Ids expected = tokenizer.encode(text);
  std::vector<std::thread> threads;
  std::array<int, 4> right{};
  for (int& mine : right) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) mine += tokenizer.encode(text) == expected;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(right, ElementsAre(200, 200, 200, 200));
}

TEST(TextStream, NeverGivesAPartOfACharacter) {
  const auto tokenizer = train_tokenizer({"x"}, {.vocabulary = 257});  // every byte a token
  const std::string text = "a\u00e9\u20ac\U0001f600b\xff\xe2\x82z\xed\xa0\x80\xf0\x9f";
  TextStream stream(tokenizer);
  std::vector<std::string> pieces;
  std::string whole;
  for (const int32_t id : tokenizer.encode(text)) {
    pieces.push_back(stream.add(id));
    whole += pieces.back();
  }
  EXPECT_THAT(std::vector(pieces.begin(), pieces.begin() + 11),
              ElementsAre("a", "", "\u00e9", "", "", "\u20ac", "", "", "", "\U0001f600", "b"));
  EXPECT_EQ(pieces[11], "\xff");
  EXPECT_EQ(pieces.back(), "");
  EXPECT_EQ(whole + stream.finish(), text);
  EXPECT_EQ(stream.finish(), "");
  EXPECT_THAT(message_of<DataError>([&] { stream.add(1000); }), HasSubstr("1000 is not a token"));
}

TEST(TrainTokenizer, StopsAtTheSizeOrWhenNothingIsFrequent) {
  EXPECT_EQ(small().size(), 268);
  EXPECT_EQ(small().bytes_of(256), "lo");  // as often as "ow", but of lower numbers
  EXPECT_EQ(small().id_of("<t>"), 267);
  const auto few = train_tokenizer({"abc abc"}, {.vocabulary = 1000, .min_frequency = 2});
  EXPECT_LT(few.size(), 262);
  EXPECT_THAT(message_of<ConfigError>([] { train_tokenizer({"x"}, {.vocabulary = 256}); }),
              HasSubstr("vocabulary=256 is too small"));
  EXPECT_THAT(message_of<ConfigError>([] { train_tokenizer({"x"}, {.pattern = "x+"}); }),
              HasSubstr("'x+' is not known"));
}

// With the square of a word's length it would take minutes.
TEST(TrainTokenizer, TakesAWordOfMegabytes) {
  constexpr size_t kBytes = size_t{2} << 20;
  const std::string word(kBytes, 'x');
  const auto tokenizer = train_tokenizer({word}, {.vocabulary = 257 + 20});
  EXPECT_EQ(tokenizer.bytes_of(256 + 19).size(), size_t{1} << 20);
  EXPECT_THAT(tokenizer.encode(word), ElementsAre(275, 275));
}

TEST(Trainer, AnAddedTokenOfTheTextIsNotMadeByMerging) {
  const std::vector<std::string_view> texts = {
      "END END ENDING END<|end|>END <|end|> ENDS e\u0301e e\u0301e"};
  const std::vector<AddedToken> added = {{"END"}, {"<|end|>"}, {"e\u0301e"}};
  const auto tokenizer =
      train_tokenizer(texts, {.vocabulary = 300, .min_frequency = 1, .added = added});
  std::set<std::string> all;
  for (int32_t id = 0; id < tokenizer.size(); ++id) all.emplace(tokenizer.bytes_of(id));
  EXPECT_EQ(all.size(), static_cast<size_t>(tokenizer.size()));
  for (size_t i = 0; i < added.size(); ++i) {
    const auto id = tokenizer.size() - 3 + static_cast<int32_t>(i);
    EXPECT_EQ(tokenizer.id_of(added[i].content), id);
    EXPECT_EQ(tokenizer.encode(added[i].content), (Ids{id}));
    const auto as_text = tokenizer.encode(added[i].content, {.special = false});
    EXPECT_THAT(as_text, Each(Lt(tokenizer.size() - 3)));
  }
}

TEST(Trainer, AddedTokensThatAreNoneOfTheirOwnAreRefused) {
  const auto message = [](std::vector<AddedToken> added) {
    return message_of<ConfigError>([&] { train_tokenizer({"x"}, {.added = std::move(added)}); });
  };
  EXPECT_THAT(message({{"x"}}), HasSubstr("'x' is a byte, which is a token already"));
  EXPECT_THAT(message({{""}}), HasSubstr("'' is empty"));
  EXPECT_THAT(message({{"<a>"}, {"<a>", false}}), HasSubstr("'<a>' comes twice"));
  EXPECT_THAT(message({{"\xff\xfe"}}), HasSubstr("is not UTF-8"));
}

std::string refused(std::string json, const std::string& from, const std::string& to) {
  const size_t at = json.find(from);
  EXPECT_NE(at, json.npos) << from;
  json.replace(at, from.size(), to);
  return message_of<DataError>([&] { Tokenizer::from_json(json, "t.json"); });
}

TEST(TokenizerFile, WhatIsAnotherKindIsRefusedByName) {
  const std::string json = small().to_json();
  EXPECT_THAT(refused(json, "\"NFC\"", "\"Lowercase\""),
              HasSubstr("t.json: the normalizer 'Lowercase'"));
  EXPECT_THAT(refused(json, "\"BPE\"", "\"Unigram\""), HasSubstr("the model 'Unigram'"));
  EXPECT_THAT(refused(json, "\\\\p{N}|", "\\\\p{N}{1,2}|"), HasSubstr("the pattern '"));
  EXPECT_THAT(refused(json, "\"Isolated\"", "\"Removed\""), HasSubstr("Isolated"));
  EXPECT_THAT(refused(json, "\"dropout\": null", "\"dropout\": 0.5"), HasSubstr("has dropout"));
  EXPECT_THAT(refused(json, "\"byte_fallback\": false", "\"byte_fallback\": true"),
              HasSubstr("byte_fallback"));
  EXPECT_THAT(refused(json, "\"lstrip\": false", "\"lstrip\": true"),
              HasSubstr("'<|end|>' has lstrip"));
  EXPECT_THAT(refused(json, "\"add_prefix_space\": false", "\"add_prefix_space\": true"),
              HasSubstr("add_prefix_space"));
}

TEST(TokenizerFile, ANumberIsOfOneTokenAndATokenHasOneNumber) {
  const std::string json = small().to_json();
  EXPECT_THAT(refused(json, "\"!\": 0", "\"!\": 1"), HasSubstr("two tokens have the number 1"));
  const auto other_id = [&](const char* id) { return refused(json, "\"id\": 267", id); };
  EXPECT_THAT(other_id("\"id\": 256"),
              HasSubstr("'<t>' has the number 256; by model.vocab it would be 267"));
  EXPECT_THAT(other_id("\"id\": 300"), HasSubstr("'<t>' has the number 300;"));
  const std::string content = "\"content\": \"<t>\"";
  EXPECT_THAT(refused(json, content, "\"content\": \"lo\""),
              HasSubstr("'lo' has the number 267; by model.vocab it would be 256"));
  EXPECT_THAT(refused(json, content, "\"content\": \"<|end|>\""),
              HasSubstr("'<|end|>' has the numbers 266 and 267"));
}

TEST(TokenizerFile, WhatNoFileCanSayIsRefused) {
  // This letter stands for the byte 0xb6 there.
  const auto tokenizer = train_tokenizer({"x"}, {.vocabulary = 257, .added = {{"\u00b6"}}});
  EXPECT_EQ(tokenizer.encode("\u00b6"), (Ids{256}));
  EXPECT_THAT(message_of<DataError>([&] { tokenizer.to_json(); }),
              HasSubstr("the added token '\u00b6'"));
  EXPECT_THAT(message_of<DataError>([&] {
                Tokenizer::from_tiktoken(qwen_ranks(),
                                         {.added = std::vector<AddedToken>{{"\xff\xfe"}}});
              }),
              HasSubstr("is not UTF-8"));
}

TEST(TokenizerFile, APathThatCannotBeIsADataError) {
  const std::string path = "/tmp/" + std::string(300, 'x');
  EXPECT_THAT(message_of<DataError>([&] { Tokenizer::from_file(path); }),
              HasSubstr("File name too long"));
}

TEST(TokenizerFile, DamageIsNamed) {
  const std::string json = small().to_json();
  EXPECT_THAT(refused(json, "{", ""), HasSubstr("this is not JSON"));
  EXPECT_THAT(refused(json, "\"!\": 0", "\"!\": -1"), HasSubstr("not the number of a token"));
  EXPECT_THAT(refused(json, "\"!\": 0", "\"!\": 99999999"), HasSubstr("99999999"));
  EXPECT_THAT(refused(json, "\"!\": 0", "\"!!\": 0"), HasSubstr("no token for the byte 0x21"));
  EXPECT_THAT(refused(json, "[\"l\", \"o\"]", "[\"l\", \"zz\"]"),
              HasSubstr("'zz' of model.merges"));
  EXPECT_THAT(message_of<DataError>([] { Tokenizer::from_json(std::string(100000, '['), "deep"); }),
              HasSubstr("nested deeper"));
  EXPECT_THAT(message_of<DataError>([] { Tokenizer::from_file("/nowhere/tokenizer.json"); }),
              HasSubstr("/nowhere/tokenizer.json: cannot be opened: No such file"));
}

TEST(TiktokenFile, DamageIsNamedWithItsLine) {
  const Folder folder;
  const auto message = [&](const std::string& text) {
    text::write_file(folder / "x.tiktoken", text);
    return message_of<DataError>([&] { Tokenizer::from_file(folder / "x.tiktoken"); });
  };
  EXPECT_THAT(message("IQ== 0\nIg= 1\n"), HasSubstr("line 2 is not a token"));
  EXPECT_THAT(message("IQ== 0\nIg== x\n"), HasSubstr("line 2 is not a token"));
  EXPECT_THAT(message("IQ== 0\nIg== 0\n"), HasSubstr("the rank 0 or its token is there twice"));
  EXPECT_THAT(message("IQ== 0\n"), HasSubstr("no token for the byte 0x00"));
}

}  // namespace
}  // namespace lockstep::test
