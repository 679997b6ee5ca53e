#include "tokenize.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>

#include "core/counted.h"
#include "lockstep/core/error.h"
#include "lockstep/text/token_files.h"
#include "lockstep/text/tokenizer.h"
#include "lockstep/text/tokenizer_trainer.h"
#include "text/files.h"

namespace lockstep::tool {
namespace {

constexpr const char* kTokenizeFooter =
    R"(Each FILE is a document; of folders, each file in them, in the order of names. --to gets tokens.json, the tokens in
00000.bin and so on, and tokenizer.json. docs/transformer.md.

  lockstep tokenize book.txt notes/ --to corpus --vocabulary 4096
  lockstep tokenize *.txt --to corpus --tokenizer qwen.tiktoken --separator '<|endoftext|>'
)";

std::vector<std::string> all_files(const std::vector<std::string>& given) {
  std::vector<std::string> out;
  for (const auto& path : given) {
    std::error_code none;
    if (!std::filesystem::is_directory(path, none)) {
      out.push_back(path);
      continue;
    }
    std::vector<std::string> within;
    try {
      for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
        if (entry.is_regular_file()) within.push_back(entry.path().string());
      }
    } catch (const std::filesystem::filesystem_error& error) {
      throw DataError(
          fmt::format("[tokenize] {}: a folder cannot be read: {}", path, error.code().message()));
    }
    std::sort(within.begin(), within.end());
    out.insert(out.end(), within.begin(), within.end());
  }
  return out;
}

// Texts that are read twice: to train the tokenizer, and to be turned into tokens.
class Texts {
 public:
  const std::string& read(const std::string& path) {
    const auto kept = kept_.find(path);
    if (kept != kept_.end()) return kept->second;
    std::error_code error;
    if (std::filesystem::is_regular_file(path, error)) return last_ = text::read_file(path);
    // A pipe gives its text once.
    return kept_[path] = text::read_file(path);
  }

 private:
  std::map<std::string, std::string> kept_;
  std::string last_;
};

// The documents of all files, one after the other.
class Documents {
 public:
  enum class Are { Files, Lines };
  Documents(Texts& texts, std::vector<std::string> files, Are are)
      : texts_(texts), files_(std::move(files)), are_(are) {}

  std::optional<std::string> next() {
    while (at_ >= text_.size()) {
      if (file_ == files_.size()) return std::nullopt;
      text_ = texts_.read(files_[file_++]);
      at_ = 0;
    }
    const size_t begin = at_;
    const size_t end =
        are_ == Are::Files ? text_.size() : std::min(text_.find('\n', begin), text_.size());
    at_ = end + 1;
    return text_.substr(begin, end - begin);
  }

 private:
  Texts& texts_;
  std::vector<std::string> files_;
  Are are_;
  size_t file_ = 0, at_ = 0;
  std::string text_;
};

}  // namespace

TokenizeCommand::TokenizeCommand(CLI::App& program) {
  auto& command = *program.add_subcommand("tokenize", "Turn text into files of tokens to train on");
  command.footer(kTokenizeFooter);
  command.get_formatter()->column_width(28);
  command.add_option("FILE", files_, "Texts, or folders of them")->required();
  command.add_option("--to", to_, "The folder to write")->type_name("FOLDER")->required();
  command
      .add_option("--tokenizer", tokenizer_,
                  "tokenizer.json or a .tiktoken file (one is trained on the text)")
      ->type_name("FILE");
  command.add_option("--vocabulary", vocabulary_, "Tokens of the tokenizer that is trained (8192)")
      ->type_name("N");
  command.add_option("--separator", separator_, "The token after each document (<|endoftext|>)")
      ->type_name("TOKEN");
  command.add_option("--shard-tokens", shard_tokens_, "Tokens of a file (100000000)")
      ->type_name("N");
  command.add_flag("--lines", lines_, "Each line is a document");
}

int TokenizeCommand::carry_out() {
  const auto files = all_files(files_);
  if (files.empty()) {
    throw ConfigError(
        fmt::format("[tokenize] {} has no files in it: name texts, or a folder of them",
                    fmt::join(files_, ", ")));
  }
  Texts texts;
  const auto are = lines_ ? Documents::Are::Lines : Documents::Are::Files;
  std::optional<Tokenizer> tokenizer;
  if (tokenizer_.empty()) {
    Documents documents(texts, files, are);
    tokenizer = text::train_tokenizer([&] { return documents.next(); },
                                      {.vocabulary = vocabulary_, .added = {{separator_}}});
  } else {
    tokenizer = Tokenizer::from_file(tokenizer_);
  }
  const auto separator = tokenizer->id_of(separator_);
  if (!separator) {
    throw ConfigError(fmt::format(
        "[tokenize] --separator {}: the tokenizer has no such token; name one that it has",
        separator_));
  }
  text::TokenWriter writer(
      to_,
      {.vocabulary = tokenizer->size(), .separator = *separator, .shard_tokens = shard_tokens_});
  tokenizer->save(to_ + "/tokenizer.json");
  Documents documents(texts, files, are);
  int64_t count = 0, bytes = 0;
  while (const auto document = documents.next()) {
    writer.add(tokenizer->encode(*document, {.special = false}));
    ++count;
    bytes += static_cast<int64_t>(document->size());
  }
  if (count == 0) {
    throw DataError(fmt::format("[tokenize] {}: all texts are empty", fmt::join(files_, ", ")));
  }
  const int64_t tokens = writer.finish();
  fmt::print("{}: {}, {}, {} of {}\n", to_, counted(count, "document"), counted(bytes, "byte"),
             counted(tokens, "token"), tokenizer->size());
  return 0;
}

}  // namespace lockstep::tool
