// Everything that the ranks and the launcher print.
#pragma once

#include <poll.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "launch/fd.h"
#include "launch/lines.h"
#include "launch/sink.h"

namespace lockstep::launch {

class Output {
 public:
  Output();

  // Carries what the rank writes into its pipes to the launcher's stdout and stderr.
  void attach(int rank, Fd out, Fd err);
  // A line of the launcher's own, on stderr.
  void say(std::string_view text);

  // What poll() has to wait for.
  void await(std::vector<pollfd>& events) const;
  // Reads and writes what can be without waiting.
  void pump();
  // When no rank is left: reads what the pipes still hold, ends unfinished lines, and lets go of
  // the pipes.
  void finish();

  bool has_pending() const { return out_->has_pending() || err_->has_pending(); }
  // Nobody reads stdout any more.
  bool is_abandoned() const { return out_->is_abandoned(); }
  int64_t lost_bytes() const;

 private:
  struct Stream {
    Fd pipe;
    Lines lines;
    Sink* sink;
  };
  // Whether there may be more.
  bool read_once(Stream& stream);

  std::shared_ptr<Sink> out_, err_;  // one, when both are the same file
  std::vector<Stream> streams_;
};

}  // namespace lockstep::launch
