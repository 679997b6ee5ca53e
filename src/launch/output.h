// Everything that the ranks and the launcher print.
#pragma once

#include <poll.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/fd.h"
#include "launch/lines.h"
#include "launch/sink.h"

namespace lockstep::launch {

// One stream of a rank.
struct Feed {
  int rank = 0;
  bool is_error = false;  // stderr
  Fd pipe = {};
  Fd file = {};          // gets the bytes as they come; none when empty
  bool shown = true;     // on the launcher's stream of the same kind
  std::string tag = {};  // before each line; "[rank N] " when empty
};

class Output {
 public:
  static constexpr size_t kLastWords = 2048;

  Output();

  // Carries what a rank writes into its pipes to where it belongs.
  void attach(Feed feed);
  // What the rank wrote last to its stderr, as far as that passed here: at most kLastWords bytes.
  std::string last_words(int rank) const;
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
    Feed feed;
    Lines lines;
    Sink* sink;
  };
  // Whether there may be more.
  bool read_once(Stream& stream);
  void keep(Stream& stream, std::string_view bytes);

  std::shared_ptr<Sink> out_, err_;  // one, when both are the same file
  std::vector<Stream> streams_;
  std::map<int, std::string> last_words_;
  int64_t lost_in_files_ = 0;
};

}  // namespace lockstep::launch
