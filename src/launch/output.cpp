#include "launch/output.h"

#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <string>

#include "lockstep/core/environment.h"

namespace lockstep::launch {
namespace {

// A terminal that understands escape sequences.
bool is_capable(const Sink& sink) {
  return sink.is_terminal() && env_text("TERM").value_or("dumb") != "dumb";
}

Lines lines_of(const Feed& feed, const Sink& sink) {
  const std::string tag = feed.tag.empty() ? fmt::format("[rank {}] ", feed.rank) : feed.tag;
  if (!is_capable(sink)) return {tag, Lines::Target::File};
  // A line may start on top of a longer progress line, and inside a colour that another rank has
  // left on.
  if (env_text("NO_COLOR")) return {"\x1b[0m\x1b[K" + tag, Lines::Target::Terminal};
  constexpr std::array kColours = {36, 33, 35, 32, 34, 31};
  const int colour = kColours[static_cast<size_t>(feed.rank) % kColours.size()];
  return {fmt::format("\x1b[0;{}m\x1b[K{}\x1b[0m", colour, tag), Lines::Target::Terminal};
}

}  // namespace

Output::Output()
    : out_(std::make_shared<Sink>(STDOUT_FILENO)),
      err_(is_same_file(STDOUT_FILENO, STDERR_FILENO) ? out_
                                                      : std::make_shared<Sink>(STDERR_FILENO)) {}

void Output::attach(Feed feed) {
  if (!feed.pipe) return;
  last_words_.erase(feed.rank);
  Sink* sink = feed.is_error ? err_.get() : out_.get();
  Lines lines = lines_of(feed, *sink);
  streams_.push_back({std::move(feed), std::move(lines), sink});
}

std::string Output::last_words(int rank) const {
  const auto found = last_words_.find(rank);
  return found == last_words_.end() ? "" : found->second;
}

void Output::say(std::string_view text) {
  err_->add(fmt::format("{}[lockstep] {}\n", is_capable(*err_) ? "\x1b[0m\x1b[K" : "", text));
}

void Output::await(std::vector<pollfd>& events) const {
  for (const Stream& stream : streams_) {
    if (stream.feed.pipe && !stream.sink->is_full())
      events.push_back({stream.feed.pipe.get(), POLLIN, 0});
  }
  for (const auto* sink : {&out_, &err_}) {
    if ((*sink)->has_pending()) events.push_back({(*sink)->fd(), POLLOUT, 0});
  }
}

// Files and the memory of the last words get the bytes as they are.
void Output::keep(Stream& stream, std::string_view bytes) {
  for (std::string_view rest = bytes; stream.feed.file && !rest.empty();) {
    const ssize_t written = write(stream.feed.file.get(), rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {  // a full disk must not end the job
      lost_in_files_ += static_cast<int64_t>(rest.size());
      break;
    }
    rest.remove_prefix(static_cast<size_t>(written));
  }
  if (!stream.feed.is_error) return;
  std::string& words = last_words_[stream.feed.rank];
  words += bytes;
  if (words.size() > kLastWords) words.erase(0, words.size() - kLastWords);
}

bool Output::read_once(Stream& stream) {
  static thread_local std::array<char, 1 << 16> buffer;
  const ssize_t got = read(stream.feed.pipe.get(), buffer.data(), buffer.size());
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  std::string lines;
  if (got > 0) {
    const std::string_view bytes(buffer.data(), static_cast<size_t>(got));
    keep(stream, bytes);
    stream.lines.feed(bytes, lines);
  } else {
    stream.lines.finish(lines);
    stream.feed.pipe.reset();
  }
  if (stream.feed.shown) stream.sink->add(lines);
  return got > 0;
}

void Output::pump() {
  for (Stream& stream : streams_) {
    if (stream.feed.pipe && !stream.sink->is_full()) read_once(stream);
  }
  out_->flush();
  err_->flush();
}

void Output::finish() {
  for (Stream& stream : streams_) {
    // At most what a pipe holds, so that the sinks may go over their limit.
    while (stream.feed.pipe && read_once(stream)) {
    }
    std::string rest;
    stream.lines.finish(rest);
    if (stream.feed.shown) stream.sink->add(rest);
  }
  streams_.clear();
  out_->flush();
  err_->flush();
}

int64_t Output::lost_bytes() const {
  return lost_in_files_ + out_->lost_bytes() + (err_ == out_ ? 0 : err_->lost_bytes());
}

}  // namespace lockstep::launch
