#include "launch/output/log_multiplexer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <utility>

#include "lockstep/core/environment.h"

namespace lockstep::launch {
namespace {

// The most bytes of the launcher's own lines, which cannot be held back.
constexpr size_t kMostSaid = 4 << 20;

// As after 2>&1: two writers would cut each other's lines.
bool is_same_file(int a, int b) {
  struct stat one, other;
  return fstat(a, &one) == 0 && fstat(b, &other) == 0 && one.st_dev == other.st_dev &&
         one.st_ino == other.st_ino;
}

}  // namespace

LogMultiplexer::LauncherStream::LauncherStream(int fd, const std::string& its_name,
                                               std::shared_ptr<Bell> bell)
    : name(its_name),
      is_terminal(isatty(fd) == 1),
      target(std::make_shared<Writer::Target>(fd, its_name)),
      writer(std::move(bell)) {}

// A terminal that understands escape sequences.
bool LogMultiplexer::is_capable(const LauncherStream& destination) {
  return destination.is_terminal && env_text("TERM").value_or("dumb") != "dumb";
}

std::string LogMultiplexer::tag_of(const Feed& feed) {
  return feed.tag.empty() ? fmt::format("[rank {}] ", feed.rank) : feed.tag;
}

LinePrefixer LogMultiplexer::lines_of(const Feed& feed, const LauncherStream& destination) {
  const std::string tag = tag_of(feed);
  if (!is_capable(destination)) return {tag, LinePrefixer::Target::File};
  // A line may start on top of a longer progress line, and inside a colour that another rank has
  // left on.
  if (env_text("NO_COLOR")) return {"\x1b[0m\x1b[K" + tag, LinePrefixer::Target::Terminal};
  constexpr std::array kColours = {36, 33, 35, 32, 34, 31};
  const int colour = kColours[static_cast<size_t>(feed.rank) % kColours.size()];
  return {fmt::format("\x1b[0;{}m\x1b[K{}\x1b[0m", colour, tag), LinePrefixer::Target::Terminal};
}

LogMultiplexer::LogMultiplexer()
    : bell_(std::make_shared<Bell>()),
      out_(std::make_shared<LauncherStream>(STDOUT_FILENO, "stdout", bell_)),
      err_(is_same_file(STDOUT_FILENO, STDERR_FILENO)
               ? out_
               : std::make_shared<LauncherStream>(STDERR_FILENO, "stderr", bell_)),
      files_(std::make_unique<Writer>(bell_)) {}

std::vector<Writer*> LogMultiplexer::writers() const {
  std::vector<Writer*> all = {files_.get(), &out_->writer};
  if (err_ != out_) all.push_back(&err_->writer);
  return all;
}

void LogMultiplexer::attach(Feed feed) {
  if (!feed.pipe) return;
  last_words_.erase(feed.rank);
  LauncherStream* destination = feed.is_error ? err_.get() : out_.get();
  LinePrefixer lines = lines_of(feed, *destination);
  streams_.push_back({std::move(feed), std::move(lines), destination});
}

std::string LogMultiplexer::last_words(int rank) const {
  const auto found = last_words_.find(rank);
  return found == last_words_.end() ? "" : found->second;
}

void LogMultiplexer::say(std::string_view text) {
  if (err_->writer.pending() >= kMostSaid) return;
  err_->add(fmt::format("{}[lockstep] {}\n", is_capable(*err_) ? "\x1b[0m\x1b[K" : "", text));
}

void LogMultiplexer::write_file(const std::string& path, std::string_view text, std::string note) {
  files_->add(std::make_shared<Writer::Target>(path), text, std::move(note));
}

bool LogMultiplexer::is_held_up(const Stream& stream) const {
  return stream.destination->writer.is_full() ||
         ((stream.feed.file || stream.feed.filtered) && files_->is_full());
}

void LogMultiplexer::await(std::vector<pollfd>& events) const {
  events.push_back({bell_->fd.get(), POLLIN, 0});
  for (const Stream& stream : streams_) {
    // The bell is set before the second check, so that it rings for progress after that.
    if (is_held_up(stream)) bell_->awaited = true;
    if (stream.feed.pipe && !is_held_up(stream)) {
      events.push_back({stream.feed.pipe.get(), POLLIN, 0});
    }
  }
}

// Files and the memory of the last words get the bytes as they are.
void LogMultiplexer::keep(Stream& stream, std::string_view bytes) {
  if (stream.feed.file) files_->add(stream.feed.file, bytes);
  if (!stream.feed.is_error) return;
  std::string& words = last_words_[stream.feed.rank];
  words += bytes;
  if (words.size() > kLastWords) words.erase(0, words.size() - kLastWords);
}

void LogMultiplexer::keep_some(const Stream& stream, std::string_view lines) {
  std::string kept;
  while (!lines.empty()) {
    const std::string_view line = lines.substr(0, lines.find('\n') + 1);
    lines.remove_prefix(line.size());
    const auto holds = [&](const std::string& text) { return line.find(text) != line.npos; };
    if (std::ranges::none_of(stream.feed.filters, holds)) continue;
    kept += tag_of(stream.feed);
    kept += line;
  }
  if (!kept.empty()) files_->add(stream.feed.filtered, kept);
}

bool LogMultiplexer::read_once(Stream& stream) {
  static thread_local std::array<char, 1 << 16> buffer;
  const ssize_t got = read(stream.feed.pipe.get(), buffer.data(), buffer.size());
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  std::string lines, bare;
  if (got > 0) {
    const std::string_view bytes(buffer.data(), static_cast<size_t>(got));
    keep(stream, bytes);
    stream.lines.feed(bytes, lines);
    if (stream.feed.filtered) stream.bare.feed(bytes, bare);
  } else {
    stream.lines.finish(lines);
    stream.bare.finish(bare);
    stream.feed.pipe.reset();
  }
  if (stream.feed.shown) stream.destination->add(lines);
  keep_some(stream, bare);
  return got > 0;
}

void LogMultiplexer::pump() {
  bell_->silence();
  for (Stream& stream : streams_) {
    if (stream.feed.pipe && !is_held_up(stream)) read_once(stream);
  }
  for (Writer* writer : writers()) {
    for (const std::string& note : writer->take_notes()) say(note);
  }
}

void LogMultiplexer::finish() {
  for (Stream& stream : streams_) {
    // At most what a pipe holds, so that the writers may have more than their limit.
    while (stream.feed.pipe && read_once(stream)) {
    }
    std::string rest, bare;
    stream.lines.finish(rest);
    if (stream.feed.shown) stream.destination->add(rest);
    stream.bare.finish(bare);
    keep_some(stream, bare);
  }
  streams_.clear();
}

size_t LogMultiplexer::pending() const {
  size_t bytes = 0;
  for (const Writer* writer : writers()) bytes += writer->pending();
  return bytes;
}

std::string LogMultiplexer::drop_pending() {
  std::vector<std::string> where;
  const auto drop = [&](Writer& writer, const std::string& name) {
    if (const size_t bytes = writer.pending()) {
      where.push_back(fmt::format("{} bytes for {}", bytes, name));
      writer.drop_pending();
    }
  };
  drop(*files_, "log files");
  if (err_ != out_) drop(out_->writer, out_->name);
  return fmt::format("{}", fmt::join(where, ", "));
}

std::string LogMultiplexer::lost_where() const {
  std::vector<std::string> where;
  if (out_->writer.lost_bytes() > 0) where.push_back(out_->name);
  if (err_ != out_ && err_->writer.lost_bytes() > 0) where.push_back(err_->name);
  if (files_->lost_bytes() > 0) where.emplace_back("log files");
  return fmt::format("{}", fmt::join(where, " and "));
}

int64_t LogMultiplexer::lost_bytes() const {
  int64_t bytes = 0;
  for (const Writer* writer : writers()) bytes += writer->lost_bytes();
  return bytes;
}

}  // namespace lockstep::launch
