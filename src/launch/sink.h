// Where the ranks' output goes: the launcher's stdout and stderr, written without ever waiting for
// a slow reader.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/fd.h"

namespace lockstep::launch {

class Sink {
 public:
  explicit Sink(int fd);

  void add(std::string_view bytes) { pending_.append(bytes); }
  // Writes what can be written now. A write that fails loses the bytes, and nothing else.
  void flush();

  int fd() const { return opened_ ? opened_.get() : original_; }
  bool has_pending() const { return written_ < pending_.size(); }
  // More than the reader has taken for a while: nobody should add to it until it has.
  bool is_full() const { return pending_.size() - written_ >= kFull; }
  bool is_terminal() const { return terminal_; }
  // Its reader has gone, as `| head -1` does.
  bool is_abandoned() const { return abandoned_; }
  int64_t lost_bytes() const { return lost_bytes_; }

 private:
  static constexpr size_t kFull = 1 << 20;
  static constexpr size_t kAtOnce = 1 << 16;

  int original_;
  Fd opened_;
  bool socket_ = false, terminal_ = false, abandoned_ = false;
  std::string pending_;
  size_t written_ = 0;  // of pending_
  int64_t lost_bytes_ = 0;
};

// Whether both descriptors are one file, as after 2>&1: two sinks would cut each other's lines.
bool is_same_file(int a, int b);

}  // namespace lockstep::launch
