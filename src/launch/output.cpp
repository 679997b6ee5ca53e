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

Lines lines_of(int rank, const Sink& sink) {
  const std::string tag = fmt::format("[rank {}]", rank);
  if (!is_capable(sink)) return {tag + " ", Lines::Target::File};
  // A line may start on top of a longer progress line, and inside a colour that another rank has
  // left on.
  if (env_text("NO_COLOR")) return {"\x1b[0m\x1b[K" + tag + " ", Lines::Target::Terminal};
  constexpr std::array kColours = {36, 33, 35, 32, 34, 31};
  const int colour = kColours[static_cast<size_t>(rank) % kColours.size()];
  return {fmt::format("\x1b[0;{}m\x1b[K{}\x1b[0m ", colour, tag), Lines::Target::Terminal};
}

}  // namespace

Output::Output()
    : out_(std::make_shared<Sink>(STDOUT_FILENO)),
      err_(is_same_file(STDOUT_FILENO, STDERR_FILENO) ? out_
                                                      : std::make_shared<Sink>(STDERR_FILENO)) {}

void Output::attach(int rank, Fd out, Fd err) {
  streams_.push_back({std::move(out), lines_of(rank, *out_), out_.get()});
  streams_.push_back({std::move(err), lines_of(rank, *err_), err_.get()});
}

void Output::say(std::string_view text) {
  err_->add(fmt::format("{}[lockstep] {}\n", is_capable(*err_) ? "\x1b[0m\x1b[K" : "", text));
}

void Output::await(std::vector<pollfd>& events) const {
  for (const Stream& stream : streams_) {
    if (stream.pipe && !stream.sink->is_full()) events.push_back({stream.pipe.get(), POLLIN, 0});
  }
  for (const auto* sink : {&out_, &err_}) {
    if ((*sink)->has_pending()) events.push_back({(*sink)->fd(), POLLOUT, 0});
  }
}

bool Output::read_once(Stream& stream) {
  static thread_local std::array<char, 1 << 16> buffer;
  const ssize_t got = read(stream.pipe.get(), buffer.data(), buffer.size());
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  std::string lines;
  if (got > 0) {
    stream.lines.feed({buffer.data(), static_cast<size_t>(got)}, lines);
  } else {
    stream.lines.finish(lines);
    stream.pipe.reset();
  }
  stream.sink->add(lines);
  return got > 0;
}

void Output::pump() {
  for (Stream& stream : streams_) {
    if (stream.pipe && !stream.sink->is_full()) read_once(stream);
  }
  out_->flush();
  err_->flush();
}

void Output::finish() {
  for (Stream& stream : streams_) {
    // At most what a pipe holds, so that the sinks may go over their limit.
    while (stream.pipe && read_once(stream)) {
    }
    std::string rest;
    stream.lines.finish(rest);
    stream.sink->add(rest);
  }
  streams_.clear();
  out_->flush();
  err_->flush();
}

int64_t Output::lost_bytes() const {
  return out_->lost_bytes() + (err_ == out_ ? 0 : err_->lost_bytes());
}

}  // namespace lockstep::launch
