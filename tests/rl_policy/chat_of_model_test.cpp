// How conversations with a model look.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "lockstep/core/error.h"
#include "rl/run/policy.h"
#include "rl_policy/even_course.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using Json = nlohmann::ordered_json;
using rl::ChatFormat;

// As far as a template is looked at.
const std::string kInstruct = "<|im_start|> <tool_call>\\n{\"name\": \"' }} \\n<tool_response>\\n";
const std::string kThinks = kInstruct + "last_query_index <think> enable_thinking";

TEST(ChatOfModel, IsThatOfItsTemplate) {
  const Folder folder;
  RunOptions o = rl::model_preset();
  o.model = folder / "model";
  EXPECT_EQ(rl::chat_format_of(o), ChatFormat::Qwen3) << "find_model() refuses it";
  std::filesystem::create_directories(o.model);
  EXPECT_EQ(rl::chat_format_of(o), ChatFormat::Qwen3);
  const auto config = [&](const Json& chat_template) {
    write(folder / "model/tokenizer_config.json", Json{{"chat_template", chat_template}}.dump());
    return rl::chat_format_of(o);
  };
  EXPECT_EQ(config(kInstruct), ChatFormat::Qwen3Instruct);
  EXPECT_EQ(config(kThinks), ChatFormat::Qwen3);
  const Json tools = {{"name", "tool_use"}, {"template", kInstruct}};
  EXPECT_EQ(config(Json::array({tools, {{"name", "default"}, {"template", kThinks}}})),
            ChatFormat::Qwen3Instruct);
  EXPECT_EQ(config(nullptr), ChatFormat::Qwen3);
  config(kThinks);
  write(folder / "model/chat_template.jinja", kInstruct);
  EXPECT_EQ(rl::chat_format_of(o), ChatFormat::Qwen3Instruct) << "a file of its own goes first";
  o.chat_format = "compact";
  EXPECT_EQ(rl::chat_format_of(o), ChatFormat::Compact);
}

TEST(ChatOfModel, UnknownIsRefused) {
  const Folder folder;
  std::filesystem::create_directories(folder / "model");
  write(folder / "model/chat_template.jinja", "[INST] {{ messages }}");
  RunOptions o = rl::model_preset();
  o.model = folder / "model";
  for (const auto& make : {+[](const RunOptions& of) { rl::embedded_course(of); },
                           +[](const RunOptions& of) { rl::tau2_course(of); }}) {
    EXPECT_THAT(message_of<ConfigError>([&] { make(o); }), testing::HasSubstr("--chat-format"));
  }
}

}  // namespace
}  // namespace lockstep::test
