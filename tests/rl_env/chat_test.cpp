// Conversations as text: to the byte what Qwen's templates give, and what an episode is made of.
#include "lockstep/rl/chat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "lockstep/rl/dialogue.h"
#include "rl/chat/python_json.h"

namespace lockstep::rl {
namespace {

Message message_of(const Json& json) {
  const auto role = json.at("role").get<std::string>();
  Message message{.role = role == "system"      ? Role::System
                          : role == "user"      ? Role::User
                          : role == "assistant" ? Role::Assistant
                                                : Role::Tool,
                  .content = json.at("content").get<std::string>(),
                  .reasoning = json.value("reasoning_content", "")};
  if (json.contains("tool_calls")) {
    for (const auto& call : json.at("tool_calls")) {
      const auto& arguments = call.at("function").at("arguments");
      message.calls.push_back({.name = call.at("function").at("name").get<std::string>(),
                               .arguments = arguments.is_string() ? arguments.get<std::string>()
                                                                  : python_json(arguments)});
    }
  }
  return message;
}

TEST(ChatText, EqualsWhatQwensTemplatesGive) {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/tests/rl_env/chat_cases.json");
  const auto cases = Json::parse(file);
  EXPECT_EQ(cases.size(), 42U);
  for (const auto& known : cases) {
    std::vector<Message> messages;
    for (const auto& message : known.at("messages")) messages.push_back(message_of(message));
    std::vector<std::string> tools;
    for (const auto& tool : known.at("tools")) tools.push_back(python_json(tool));
    const RenderOptions options{
        .format = chat_format(known.at("format").get<std::string>()),
        .thinking = known.at("thinks").get<bool>() ? Thinking::Allowed : Thinking::Off,
        .then = known.at("speaks").get<bool>() ? RenderOptions::Then::AgentSpeaks
                                               : RenderOptions::Then::Nothing};
    EXPECT_EQ(render(messages, tools, options), known.at("text").get<std::string>())
        << known.at("messages").dump();
  }
}

TEST(ChatText, ACompactDialogueIsInPieces) {
  const EmbeddedDomain domain("telecom");
  auto dialogue = play(domain, domain.task("train", 0));
  const auto pieces = pieces_of(dialogue.scene, dialogue.messages);
  ASSERT_EQ(pieces.size(), 8U);
  EXPECT_EQ(
      pieces[0].text,
      "<|im_start|>system\ntelecom<|im_end|>\n<|im_start|>user\nMy phone has no data.<|im_end|>\n"
      "<|im_start|>assistant\n");
  EXPECT_EQ(pieces[1], (ChatPiece{"Which id?<|im_end|>", true}));
  EXPECT_EQ(pieces[2].text, "\n<|im_start|>user\n322<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(pieces[3].text,
            "<tool_call>\n{\"name\": \"get_line\", \"arguments\": {\"id\": \"322\"}}\n</tool_call>"
            "<|im_end|>");
  EXPECT_EQ(pieces[4].text,
            "\n<|im_start|>user\n<tool_response>\n{\"ref\": \"772\", \"line\": \"suspended\", "
            "\"abroad\": \"no\", \"roaming\": \"on\"}\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n");
  for (size_t i = 0; i < pieces.size(); ++i) EXPECT_EQ(pieces[i].by_agent, i % 2 == 1);
  dialogue.messages.resize(1);
  EXPECT_THROW(pieces_of(dialogue.scene, dialogue.messages), DataError);
}

TEST(ChatText, PiecesAreWhatAnEpisodeReads) {
  const EmbeddedDomain domain("retail");
  for (const ChatFormat format :
       {ChatFormat::Compact, ChatFormat::Qwen3, ChatFormat::Qwen3Instruct}) {
    const ChatOptions options{.format = format};
    const auto dialogue = play(domain, domain.task("train", 3));
    const auto world = domain.make();
    ScriptedUser user;
    Episode episode(*world, user);
    std::string text = prompt_text(dialogue.scene, episode.begin(dialogue.scene.task, 0), options);
    std::string together;
    for (const auto& piece : pieces_of(dialogue.scene, dialogue.messages, options)) {
      together += piece.text;
      if (!piece.by_agent) continue;
      text += piece.text;
      const auto seen =
          episode.agent_says(std::string_view(piece.text)
                                 .substr(0, piece.text.size() - std::string("<|im_end|>").size()));
      if (!episode.over()) text += reply_text(seen, options);
    }
    EXPECT_EQ(text, together);
    EXPECT_EQ(episode.reward().value, 1);
  }
}

TEST(ChatText, FormatsAreRecognisedOrRefused) {
  EXPECT_EQ(chat_format("compact"), ChatFormat::Compact);
  EXPECT_THROW(chat_format("llama"), ConfigError);
  const std::string body = "<|im_start|> <tool_call>\\n{\"name\": \"' }} \\n<tool_response>\\n";
  EXPECT_EQ(chat_format_of_template(body), ChatFormat::Qwen3Instruct);
  EXPECT_EQ(chat_format_of_template(body + "last_query_index <think> enable_thinking"),
            ChatFormat::Qwen3);
  for (const std::string other : {"[INST]", "You are Qwen, created by", "<function=", "<think>",
                                  "<|image_pad|>", "<think> enable_thinking ns.last_query_index"}) {
    EXPECT_THROW(chat_format_of_template(body + other + (other == "[INST]" ? "<think>" : "")),
                 ConfigError)
        << other;
  }
}

TEST(PythonJson, IsWhatJsonDumpsWrites) {
  EXPECT_EQ(python_repr(1e16), "1e+16");
  EXPECT_EQ(python_repr(123456789012345.6), "123456789012345.6");
  EXPECT_EQ(python_repr(0.0001), "0.0001");
  EXPECT_EQ(python_repr(0.00001), "1e-05");
  EXPECT_EQ(python_repr(-0.0), "-0.0");
  EXPECT_EQ(python_repr(100), "100.0");
  EXPECT_EQ(python_json(Json::parse("{\"b\":[1,2.0,null],\"a\":\"é\\u0001\"}")),
            "{\"b\": [1, 2.0, null], \"a\": \"é\\u0001\"}");
}

}  // namespace
}  // namespace lockstep::rl
