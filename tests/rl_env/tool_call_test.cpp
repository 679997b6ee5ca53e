// Calls of tools in what a model writes.
#include "lockstep/rl/tool_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace lockstep::rl {
namespace {

using testing::HasSubstr;

std::string fault(std::string_view text, const ToolCallOptions& options = {}) {
  return parse_agent_text(text, options).fault;
}

TEST(ToolCallText, TextIsText) {
  EXPECT_EQ(parse_agent_text("  Which id?\n").text, "Which id?");
  EXPECT_EQ(parse_agent_text("</tool_call>").text, "</tool_call>");
  EXPECT_EQ(parse_agent_text("<think>\n\n</think>\n\nDone.").text, "Done.");
  EXPECT_EQ(parse_agent_text("begun in the prompt</think>Done.").text, "Done.");
  EXPECT_EQ(parse_agent_text("Done.<think>and no end").text, "Done.");
}

TEST(ToolCallText, ACallIsNameAndArguments) {
  const auto turn = parse_agent_text(
      "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"id\":\"4\",\"n\":1e-5, "
      "\"l\":[1,true,null]}}\n"
      "</tool_call>\n");
  EXPECT_EQ(turn.fault, "");
  ASSERT_EQ(turn.calls.size(), 1U);
  EXPECT_EQ(turn.calls[0].name, "add");
  EXPECT_EQ(turn.calls[0].arguments, "{\"id\": \"4\", \"n\": 1e-05, \"l\": [1, true, null]}");
  EXPECT_EQ(turn.text, "");
}

TEST(ToolCallText, ArgumentsMayBeATextOnce) {
  const auto call = [](const std::string& arguments) {
    return "<tool_call>{\"name\":\"f\",\"arguments\":" + arguments + "}</tool_call>";
  };
  EXPECT_EQ(parse_agent_text(call(R"("{\"a\": 1}")")).calls.at(0).arguments, "{\"a\": 1}");
  EXPECT_THAT(fault(call(R"("\"{}\"")")), HasSubstr("not an object"));
  EXPECT_THAT(fault(call("[]")), HasSubstr("not an object"));
  EXPECT_THAT(fault(call("1")), HasSubstr("not an object"));
}

// Python keeps all digits; as a double it would be another number.
TEST(ToolCallText, NoWholeNumberIsRounded) {
  const auto call = [](const std::string& number) {
    return "<tool_call>{\"name\":\"f\",\"arguments\":{\"n\":" + number + "}}</tool_call>";
  };
  for (const std::string number : {"18446744073709551615", "-9223372036854775808", "1e+25", "0"}) {
    EXPECT_EQ(parse_agent_text(call(number)).calls.at(0).arguments, "{\"n\": " + number + "}");
  }
  for (const std::string number : {"18446744073709551616", "-9223372036854775809"}) {
    EXPECT_THAT(fault(call(number)), HasSubstr(number + " is a whole number beyond 64 bits"));
  }
  EXPECT_EQ(fault(call("\"99999999999999999999\"")), "");
}

TEST(ToolCallText, EachDamageIsNamed) {
  const std::string good = "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>";
  EXPECT_EQ(fault(good), "");
  EXPECT_THAT(fault(""), HasSubstr("empty"));
  EXPECT_THAT(fault("I look. " + good), HasSubstr("before"));
  EXPECT_THAT(fault(good + " so"), HasSubstr("after"));
  EXPECT_THAT(fault(good + good), HasSubstr("more than one"));
  EXPECT_THAT(fault("<tool_call>{\"name\":\"f\",\"arguments\":{}}"), HasSubstr("missing"));
  EXPECT_THAT(fault("<tool_call>{\"name\":\"f\"}</tool_call>"), HasSubstr("arguments"));
  EXPECT_THAT(fault("<tool_call>{\"name\":1,\"arguments\":{}}</tool_call>"), HasSubstr("name"));
  EXPECT_THAT(fault("<tool_call>[]</tool_call>"), HasSubstr("object"));
  EXPECT_THAT(fault("<tool_call>{</tool_call>"), HasSubstr("not JSON"));
  EXPECT_THAT(fault("<tool_call>{\"name\":\"\xff\",\"arguments\":{}}</tool_call>"),
              HasSubstr("not JSON"));
  EXPECT_THAT(fault("<tool_call>" + std::string(100'000, '[') + "</tool_call>"),
              HasSubstr("nested"));
}

TEST(ToolCallText, OptionsAllowMore) {
  const std::string one = "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>";
  EXPECT_EQ(parse_agent_text("I look. " + one, {.mixed = MixedText::Drop}).calls.size(), 1U);
  EXPECT_EQ(parse_agent_text(one + "\n" + one, {.parallel = ParallelCalls::Allow}).calls.size(),
            2U);
}

}  // namespace
}  // namespace lockstep::rl
