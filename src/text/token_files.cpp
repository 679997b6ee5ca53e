#include "lockstep/text/token_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/files/fd.h"
#include "core/files/lasting_path.h"
#include "core/files/read_file.h"
#include "core/process/standard_streams.h"
#include "lockstep/core/error.h"
#include "text/files.h"

namespace lockstep::text {
namespace {

constexpr std::array<std::pair<std::string_view, int64_t>, 4> kTypes = {
    {{"uint16", 2}, {"uint32", 4}, {"int32", 4}, {"int64", 8}}};

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw DataError(fmt::format("[tokens] {}: {}", path, what));
}

[[noreturn]] void fail_system(const std::string& path, std::string_view what) {
  fail(path, fmt::format("{}: {}", what, std::strerror(errno)));
}

int64_t whole_number(const nlohmann::json& json, const char* name, const std::string& path) {
  const auto found = json.find(name);
  if (found == json.end() || !found->is_number_integer() || *found < 0) {
    fail(path, fmt::format("{} is not a number of 0 or above", name));
  }
  return found->get<int64_t>();
}

template <class Stored>
int64_t element(const void* bytes, int64_t i) {
  Stored value;
  std::memcpy(&value, static_cast<const char*>(bytes) + i * static_cast<int64_t>(sizeof value),
              sizeof value);
  return static_cast<int64_t>(value);
}

template <class Stored>
void copy(const void* bytes, int64_t begin, std::span<int64_t> to) {
  for (size_t i = 0; i < to.size(); ++i)
    to[i] = element<Stored>(bytes, begin + static_cast<int64_t>(i));
}

}  // namespace

TokenType token_type(std::string_view name) {
  for (size_t i = 0; i < kTypes.size(); ++i) {
    if (kTypes[i].first == name) return static_cast<TokenType>(i);
  }
  throw ConfigError(
      fmt::format("[tokens] '{}' is not a type of tokens: uint16, uint32, int32, int64 are", name));
}

std::string_view name_of(TokenType type) { return kTypes[static_cast<size_t>(type)].first; }
int64_t bytes_of(TokenType type) { return kTypes[static_cast<size_t>(type)].second; }

struct TokenWriter::State {
  std::string folder;
  TokenWriterOptions options;
  TokenType type;
  nlohmann::ordered_json shards = nlohmann::ordered_json::array();
  Fd fd;  // of the shard that is written
  std::string path;
  int64_t tokens = 0, documents = 0;  // of the file that is written
  int64_t all = 0;
  std::string buffer;

  void write_out() {
    for (std::string_view rest = buffer; !rest.empty();) {
      const ssize_t n = ::write(fd.get(), rest.data(), rest.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail_system(path, "cannot be written");
      rest.remove_prefix(static_cast<size_t>(n));
    }
    buffer.clear();
  }
  void put(int32_t token) {
    const int64_t bytes = bytes_of(type);
    const auto value = static_cast<uint32_t>(token);
    for (int64_t i = 0; i < bytes; ++i) buffer.push_back(static_cast<char>(value >> (8 * i)));
    if (buffer.size() >= 1 << 20) write_out();
    ++tokens;
    ++all;
  }
  void begin_shard() {
    path = fmt::format("{}/{:05}.bin", folder, shards.size());
    open_standard_streams();
    fd = Fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (!fd) fail_system(path, "cannot be created");
  }
  void end_shard() {
    if (!fd) return;
    write_out();
    if (::fsync(fd.get()) != 0) fail_system(path, "cannot be written");
    fd.reset();
    shards.push_back({{"file", std::filesystem::path(path).filename().string()},
                      {"tokens", tokens},
                      {"documents", documents}});
    tokens = documents = 0;
  }
};

TokenWriter::TokenWriter(const std::string& folder, const TokenWriterOptions& options)
    : state_(std::make_unique<State>()) {
  if (options.vocabulary < 1 || options.vocabulary > std::numeric_limits<int32_t>::max() ||
      options.separator < 0 || options.separator >= options.vocabulary ||
      options.shard_tokens < 1) {
    throw ConfigError(
        fmt::format("[tokens] {}: vocabulary = {}, separator = {}, shard_tokens = {}: the "
                    "separator is below the vocabulary, the others above 0",
                    folder, options.vocabulary, options.separator, options.shard_tokens));
  }
  std::error_code error;  // what is wrong with the folder, making it says
  if (std::filesystem::exists(folder + "/tokens.json", error)) {
    throw ConfigError(fmt::format(
        "[tokens] {} has token files already: give another folder, or remove it", folder));
  }
  std::filesystem::create_directories(folder, error);
  if (error) fail(folder, fmt::format("cannot be made: {}", error.message()));
  state_->folder = lasting_path(folder);
  state_->options = options;
  state_->type = options.vocabulary <= 65536 ? TokenType::Uint16 : TokenType::Uint32;
}

TokenWriter::~TokenWriter() = default;

void TokenWriter::add(std::span<const int32_t> document) {
  for (const int32_t token : document) {
    if (token < 0 || token >= state_->options.vocabulary) {
      fail(state_->folder, fmt::format("a document has the token {}; the vocabulary is {}", token,
                                       state_->options.vocabulary));
    }
  }
  if (state_->tokens >= state_->options.shard_tokens) state_->end_shard();
  if (!state_->fd) state_->begin_shard();
  for (const int32_t token : document) state_->put(token);
  state_->put(state_->options.separator);
  ++state_->documents;
}

int64_t TokenWriter::finish() {
  state_->end_shard();
  const nlohmann::ordered_json index = {{"format", "lockstep.tokens"},
                                        {"version", 1},
                                        {"dtype", name_of(state_->type)},
                                        {"vocabulary", state_->options.vocabulary},
                                        {"separator", state_->options.separator},
                                        {"shards", state_->shards}};
  write_file(state_->folder + "/tokens.json", index.dump(2) + "\n");
  return state_->all;
}

TokenFiles TokenFiles::open(const std::string& path, TokenType type) {
  TokenFiles files;
  std::error_code none;
  if (!std::filesystem::is_directory(path, none)) {
    files.type_ = type;
    files.add(path, std::nullopt);
    return files;
  }
  const std::string name = path + "/tokens.json";
  if (!may_exist(name)) {
    fail(name,
         "cannot be opened: there is none; `lockstep tokenize FILES --to FOLDER` makes such "
         "a folder from texts");
  }
  const auto json = nlohmann::json::parse(read_file(name), nullptr, false);
  if (!json.is_object() || json.value("format", nlohmann::json()) != "lockstep.tokens" ||
      json.value("version", nlohmann::json()) != 1) {
    fail(name, "this is not \"lockstep.tokens\" of version 1");
  }
  const auto dtype = json.find("dtype");
  if (dtype == json.end() || !dtype->is_string()) fail(name, "dtype is not a string");
  try {
    files.type_ = token_type(dtype->get<std::string>());
  } catch (const ConfigError& error) {
    fail(name, error.what());
  }
  files.vocabulary_ = whole_number(json, "vocabulary", name);
  files.separator_ = whole_number(json, "separator", name);
  const auto shards = json.find("shards");
  if (shards == json.end() || !shards->is_array()) fail(name, "shards is not an array");
  for (const auto& shard : *shards) {
    const auto file = shard.is_object() ? shard.find("file") : shard.end();
    if (!shard.is_object() || file == shard.end() || !file->is_string() ||
        file->get<std::string>().find('/') != std::string::npos) {
      fail(name, "a shard has no file name of this folder");
    }
    files.add(path + "/" + file->get<std::string>(), whole_number(shard, "tokens", name));
  }
  return files;
}

void TokenFiles::add(const std::string& path, std::optional<int64_t> tokens) {
  // A pipe that nothing writes to would be waited for.
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) fail_system(path, "cannot be opened");
  struct stat status {};
  const bool is_file = ::fstat(fd.get(), &status) == 0 && S_ISREG(status.st_mode);
  const auto bytes = static_cast<int64_t>(status.st_size);
  const int64_t each = bytes_of(type_);
  if (!is_file) fail(path, "this is not a regular file");
  if (bytes % each != 0 || (tokens && bytes / each != *tokens)) {
    fail(path, fmt::format("it has {} bytes; {} tokens of {} are wanted", bytes,
                           tokens ? fmt::to_string(*tokens) : "whole", name_of(type_)));
  }
  std::shared_ptr<const void> mapped;
  if (bytes > 0) {
    void* address = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED, fd.get(), 0);
    if (address == MAP_FAILED) fail_system(path, "cannot be mapped");
    mapped = std::shared_ptr<const void>(address, [bytes](const void* at) {
      ::munmap(const_cast<void*>(at), static_cast<size_t>(bytes));
    });
  }
  shards_.push_back({path, std::move(mapped), bytes / each});
}

int64_t TokenFiles::tokens() const {
  int64_t sum = 0;
  for (const auto& shard : shards_) sum += shard.tokens;
  return sum;
}

void TokenFiles::read(size_t shard, int64_t begin, std::span<int64_t> to) const {
  const Shard& from = shards_.at(shard);
  const auto count = static_cast<int64_t>(to.size());
  if (begin < 0 || count > from.tokens || begin > from.tokens - count) {
    fail(from.path,
         fmt::format("tokens {} to {} of {} are wanted", begin, begin + count, from.tokens));
  }
  if (count == 0) return;
  switch (type_) {
    case TokenType::Uint16:
      copy<uint16_t>(from.bytes.get(), begin, to);
      break;
    case TokenType::Uint32:
      copy<uint32_t>(from.bytes.get(), begin, to);
      break;
    case TokenType::Int32:
      copy<int32_t>(from.bytes.get(), begin, to);
      break;
    case TokenType::Int64:
      copy<int64_t>(from.bytes.get(), begin, to);
      break;
  }
  const int64_t limit = vocabulary_.value_or(std::numeric_limits<int64_t>::max());
  for (size_t i = 0; i < to.size(); ++i) {
    if (to[i] < 0 || to[i] >= limit) {
      fail(from.path, fmt::format("the token {} at {} is outside the vocabulary{}", to[i],
                                  begin + static_cast<int64_t>(i),
                                  vocabulary_ ? fmt::format(" of {}", limit) : ""));
    }
  }
}

}  // namespace lockstep::text
