// The same numbers as PyPI's `tokenizers`.
#include "text/peer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/text/tokenizer.h"
#include "lockstep/text/tokenizer_trainer.h"
#include "text/unicode.h"

namespace lockstep::test {
namespace {

using text::read_file;
using text::to_nfc;
using text::Tokenizer;
using text::write_file;

// Where both differ first, with what stands around it; nothing when they are the same.
std::string difference(const Tokenizer& tokenizer, const std::vector<int32_t>& ours,
                       const std::vector<int32_t>& theirs) {
  const auto [a, b] = std::mismatch(ours.begin(), ours.end(), theirs.begin(), theirs.end());
  if (a == ours.end() && b == theirs.end()) return "";
  const auto some = [&](const std::vector<int32_t>& ids, auto at) {
    const auto begin = ids.begin() + std::max<long>(0, at - ids.begin() - 4);
    const auto end = ids.begin() + std::min<long>(ids.end() - ids.begin(), at - ids.begin() + 6);
    const std::vector<int32_t> part(begin, end);
    return fmt::format("{} {:?}", fmt::join(part, " "), tokenizer.decode(part));
  };
  return fmt::format("{} and {} tokens; at {}: {} | {}", ours.size(), theirs.size(),
                     a - ours.begin(), some(ours, a), some(theirs, b));
}

void expect_same_as_peer(const Folder& folder, const std::string& json, const std::string& corpus) {
  const auto tokenizer = Tokenizer::from_file(json);
  const std::string text = read_file(corpus);
  peer({"encode", json, corpus, folder / "ids"});
  const auto theirs = ids_in(folder / "ids");
  const auto ours = tokenizer.encode(text);
  EXPECT_EQ(difference(tokenizer, ours, theirs), "");
  EXPECT_TRUE(tokenizer.decode(ours) == to_nfc(text));
}

class Peer : public testing::Test {
 protected:
  void compare(int64_t bytes) {
    const Folder folder;
    peer({"corpus", folder / "corpus", std::to_string(bytes)});
    peer({"qwen", qwen_ranks(), folder / "qwen.json"});
    expect_same_as_peer(folder, folder / "qwen.json", folder / "corpus");
    const auto tokenizer = Tokenizer::from_tiktoken(qwen_ranks());
    EXPECT_TRUE(tokenizer.encode(read_file(folder / "corpus")) == ids_in(folder / "ids"));
  }
};

TEST_F(Peer, QwensOwn) { compare(1'200'000); }
// 12 MB take a minute.
TEST_F(Peer, DISABLED_QwensOwnOnMuch) { compare(12'000'000); }

TEST(PeerTrained, TheSameMergesAndNumbersAndTheirFileIsRead) {
  const Folder folder;
  peer({"corpus", folder / "corpus", "200000", "short"});
  const std::string text = read_file(folder / "corpus");
  peer({"train", folder / "corpus", folder / "theirs.json", "1500"});
  std::vector<std::string> lines;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin) + "\n");
    begin = end + 1;
  }
  const auto ours = text::train_tokenizer({lines.begin(), lines.end()}, {.vocabulary = 1500});
  const auto theirs = Tokenizer::from_file(folder / "theirs.json");
  ASSERT_EQ(ours.size(), theirs.size());
  for (int32_t id = 0; id < ours.size(); ++id) EXPECT_EQ(ours.bytes_of(id), theirs.bytes_of(id));
  EXPECT_EQ(ours.encode(text), theirs.encode(text));
  ours.save(folder / "ours.json");
  expect_same_as_peer(folder, folder / "ours.json", folder / "corpus");
}

// 12 MB of every character, by a tokenizer that knows 1 MB of it: takes a minute.
TEST(PeerTrained, DISABLED_OnMuch) {
  const Folder folder;
  peer({"corpus", folder / "some", "1000000", "short"});
  peer({"train", folder / "some", folder / "trained.json", "8000"});
  peer({"corpus", folder / "corpus", "12000000"});
  expect_same_as_peer(folder, folder / "trained.json", folder / "corpus");
}

TEST(PeerText, SpecialTokensAsTextAndLeftOut) {
  const Folder folder;
  const auto tokenizer = Tokenizer::from_tiktoken(qwen_ranks());
  tokenizer.save(folder / "qwen.json");
  write_file(folder / "text", "<|im_start|>user\n<think>caf\xc3\xa9</think> <|im_end|> <|im_ end");
  peer({"encode", folder / "qwen.json", folder / "text", folder / "ids", "plain"});
  const auto text = read_file(folder / "text");
  EXPECT_EQ(tokenizer.encode(text, {.special = false}), ids_in(folder / "ids"));
  peer({"encode", folder / "qwen.json", folder / "text", folder / "ids"});
  EXPECT_EQ(tokenizer.encode(text), ids_in(folder / "ids"));
  peer({"decode", folder / "qwen.json", folder / "ids", folder / "back", "skip"});
  EXPECT_EQ(tokenizer.decode(ids_in(folder / "ids"), {.special = false}),
            read_file(folder / "back"));
}

// `tokenizers` counts added tokens from the size of the vocabulary on, where that has none of them.
TEST(PeerText, AddedTokensKeepTheirNumbersBehindAGap) {
  const Folder folder;
  std::string ranks = read_file(qwen_ranks());
  ranks.resize(ranks.find(" 256\n") + 1);  // the bytes
  ranks.resize(ranks.rfind('\n') + 1);
  write_file(folder / "ranks", ranks + "YWI= 257\n");
  const auto tokenizer = Tokenizer::from_tiktoken(
      folder / "ranks", {.added = std::vector<text::AddedToken>{{"<|end|>"}, {"<\u00e9 \u4f60>"}}});
  const std::string text = "ab<|end|>\u00e9<\u00e9 \u4f60>abab";
  const auto ids = tokenizer.encode(text);
  EXPECT_EQ(ids[1], 258);
  tokenizer.save(folder / "t.json");
  write_file(folder / "text", text);
  peer({"encode", folder / "t.json", folder / "text", folder / "ids"});
  EXPECT_EQ(ids, ids_in(folder / "ids"));
  const auto again = Tokenizer::from_file(folder / "t.json");
  EXPECT_EQ(again.encode(text), ids);
  EXPECT_EQ(again.to_json(), tokenizer.to_json());
}

// An added token may be what words are made of, too: " the" in the file, where it is "\u0120the".
TEST(PeerText, AddedTokensThatWordsHaveToo) {
  const Folder folder;
  constexpr int kFiles = 150;
  peer({"random", folder.path(), std::to_string(kFiles)});
  int added = 0;
  for (int i = 0; i < kFiles; ++i) {
    const std::string path = folder / std::to_string(i);
    const auto tokenizer = Tokenizer::from_file(path + ".json");
    const std::string text = read_file(path + ".text");
    const auto theirs = ids_in(path + ".ids");
    EXPECT_EQ(difference(tokenizer, tokenizer.encode(text), theirs), "") << i;
    const auto again = Tokenizer::from_json(tokenizer.to_json());
    EXPECT_EQ(difference(again, again.encode(text), theirs), "") << i;
    for (const auto& [id, token] : tokenizer.added_tokens()) {
      EXPECT_EQ(tokenizer.id_of(token.content), id) << i;
      if (tokenizer.bytes_of(id) != token.content) ++added;
    }
  }
  EXPECT_GT(added, 0);
}

}  // namespace
}  // namespace lockstep::test
