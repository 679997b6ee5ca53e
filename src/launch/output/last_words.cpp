#include "launch/output/last_words.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>

#include "core/process/thread.h"
#include "launch/diagnosis/failure_report.h"

namespace lockstep::launch {
namespace {

constexpr size_t kMostLines = 10;

// A file system that takes longer is stuck, and the report does without the file.
constexpr auto kPatience = std::chrono::milliseconds(300);

// An error file that is longer is none.
constexpr size_t kMostError = 1 << 20;
// Of an error, in the report.
constexpr size_t kMostWords = 1000;

std::string read_end(const std::string& path, size_t most) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return "";  // a pipe would not end
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return "";
  const std::streamoff size = file.tellg();
  file.seekg(std::max<std::streamoff>(0, size - static_cast<std::streamoff>(most)));
  return {std::istreambuf_iterator<char>(file), {}};
}

// The message of torchrun's error file, {"message": {"message": ..., "extraInfo": {...}}} or
// {"message": ...}; empty for what is none.
std::string message_in(const std::string& text) {
  const auto error = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!error.is_object() || !error.contains("message")) return "";
  const auto& outer = error["message"];
  const bool is_nested = outer.is_object() && outer.contains("message");
  const auto& message = is_nested ? outer["message"] : outer;
  if (!message.is_string()) return "";
  auto words = message.get<std::string>();
  if (words.size() <= kMostWords) return words;
  size_t end = kMostWords;
  while ((static_cast<unsigned char>(words[end]) & 0xc0) == 0x80)
    --end;  // within a letter of UTF-8
  return words.substr(0, end) + " ...";
}

}  // namespace

// On a thread of its own: this one sends heartbeats.
std::string LastWords::end_of(const std::string& path, size_t most) const {
  if (stalled_) return "";
  const auto promise = std::make_shared<std::promise<std::string>>();
  auto words = promise->get_future();
  try {
    const auto read = [promise, path, most] { promise->set_value(read_end(path, most)); };
    thread_without_signals(read).detach();
  } catch (const std::system_error&) {
    promise->set_value("");
  }
  stalled_ = words.wait_for(kPatience) != std::future_status::ready;
  return stalled_ ? "" : words.get();
}

bool LastWords::is_redirected(int rank) const {
  const Options& options = session_.options;
  const int local = rank - first_rank_;
  return options.redirects.covers(local, StreamChoice::Err) &&
         !options.tee.covers(local, StreamChoice::Err);
}

std::string LastWords::file_of(int rank) const {
  return session_.logs.of_rank(restarts_, rank - first_rank_) + Logs::kErr;
}

std::string LastWords::of(int rank) const {
  return is_redirected(rank) ? end_of(file_of(rank), LogMultiplexer::kLastWords)
                             : session_.output.last_words(rank);
}

std::string LastWords::error_of(int rank) const {
  if (!session_.logs.is_on()) return "";
  return message_in(
      end_of(session_.logs.of_rank(restarts_, rank - first_rank_) + Logs::kError, kMostError));
}

std::vector<std::string> LastWords::unseen(int rank) const {
  const auto& shown = session_.options.shown_ranks;
  const bool redirected = is_redirected(rank);
  const bool hidden =
      !shown.empty() && std::find(shown.begin(), shown.end(), rank - first_rank_) == shown.end();
  if (!redirected && !hidden) return {};
  const std::string words = of(rank);
  if (words.empty()) return {};
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < words.size();) {
    const size_t end = std::min(words.find('\n', begin), words.size());
    lines.push_back("  | " + words.substr(begin, end - begin));
    begin = end + 1;
  }
  if (lines.size() > kMostLines) lines.erase(lines.begin(), lines.end() - kMostLines);
  lines.insert(lines.begin(),
               redirected ? fmt::format("the end of its stderr (all of it in {}):", file_of(rank))
                          : "the end of its stderr:");
  return lines;
}

void LastWords::write_failure_report(const Outcome& outcome, LogMultiplexer& output) const {
  std::map<int, std::string> words;
  for (const Seen& seen : outcome.seen) words[seen.rank] = of(seen.rank);
  const std::string path = session_.logs.attempt(restarts_) + "/failure.txt";
  output.write_file(path, failure_report(outcome, words), fmt::format("more in {}", path));
}

}  // namespace lockstep::launch
