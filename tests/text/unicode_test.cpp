#include "text/unicode.h"

#include <gtest/gtest.h>

#include <string>

#include "lockstep/text/utf8.h"
#include "text/pattern.h"

namespace lockstep::text {
namespace {

std::vector<std::string> words(Pattern pattern, std::string_view text) {
  std::vector<std::string> out;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = word_end(pattern, text, begin);
    out.emplace_back(text.substr(begin, end - begin));
    begin = end;
  }
  return out;
}

using Words = std::vector<std::string>;

TEST(Characters, AreReadOneByOneAndWhatIsNoUtf8IsABytePerCharacter) {
  std::string back;
  // Cut off, overlong, a surrogate, above U+10FFFF, a continuation alone.
  const std::string text =
      "a\u00e9\u20ac\U0001f600\xc3 \xc0\xaf\xed\xa0\x80\xf4\x90\x80\x80\x80\xe2\x82";
  int invalid = 0;
  for (size_t i = 0; i < text.size();) {
    const auto [code, bytes] = character_at(text, i);
    invalid += code >= kInvalidByte;
    append_character(back, code);
    i += bytes;
  }
  EXPECT_EQ(back, text);
  EXPECT_EQ(invalid, 1 + 2 + 3 + 5 + 2);
  EXPECT_EQ(valid_utf8("\u00e9\xc3z"), "\u00e9\ufffdz");
}

TEST(Words, AsQwenCutsThem) {
  EXPECT_EQ(words(Pattern::Qwen, "I'm sure  they'LL.\n\n x 12"),
            (Words{"I", "'m", " sure", " ", " they", "'LL", ".\n\n", " x", " ", "1", "2"}));
  EXPECT_EQ(words(Pattern::Qwen, "a  \n \n  b   "), (Words{"a", "  \n \n", " ", " b", "   "}));
  EXPECT_EQ(words(Pattern::Qwen, "'\u017fz (x) \r\n!"),
            (Words{"'\u017f", "z", " (", "x", ")", " \r\n", "!"}));
}

TEST(Words, WholeCallsAreCutAtSpacesDigitsAndMarks) {
  EXPECT_EQ(words(Pattern::Words, "Refund 47. Ok?\n{\"id\":  \"41\"}"),
            (Words{"Refund", " ", "4", "7", ".", " Ok", "?", "\n", "{\"id\":", "  ", "\"", "4", "1",
                   "\"}"}));
}
TEST(Words, DigitsAreTakenThreeAtATimeByGpt4sAndAllByGpt2s) {
  EXPECT_EQ(words(Pattern::Digits, "12345 6"), (Words{"123", "45", " ", "6"}));
  EXPECT_EQ(words(Pattern::Gpt2, "12345 6'S's"), (Words{"12345", " 6", "'", "S", "'s"}));
}

TEST(Nfc, ComposesOrdersAndLeavesTheRest) {
  EXPECT_EQ(to_nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(to_nfc("A\u030a\u212b"), "\u00c5\u00c5");
  EXPECT_EQ(to_nfc("a\u0301\u0323"), "\u1ea1\u0301");  // marks in the order of their classes
  EXPECT_EQ(to_nfc("\u1112\u1161\u11ab"), "\ud55c");
  EXPECT_EQ(to_nfc("\u0958"), "\u0915\u093c");  // decomposed for good
  EXPECT_EQ(to_nfc("\xff"
                   "e\u0301\xc3"),
            "\xff\u00e9\xc3");
  EXPECT_FALSE(may_change_in_nfc("plain, na\u00efve \u6587"));
  EXPECT_TRUE(may_change_in_nfc("e\u0301"));
}

}  // namespace
}  // namespace lockstep::text
