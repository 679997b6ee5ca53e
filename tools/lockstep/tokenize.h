// lockstep tokenize: text into token files.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::tool {

class TokenizeCommand {
 public:
  // Adds the command, and reads into this.
  explicit TokenizeCommand(CLI::App& program);
  TokenizeCommand(const TokenizeCommand&) = delete;

  // The exit status.
  int carry_out();

 private:
  std::vector<std::string> files_;
  std::string to_, tokenizer_, separator_ = "<|endoftext|>";
  int32_t vocabulary_ = 8192;
  int64_t shard_tokens_ = 100'000'000;
  bool lines_ = false;
};

}  // namespace lockstep::tool
