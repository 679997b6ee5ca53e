// Everything that the ranks and the launcher print.
#pragma once

#include <poll.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/files/fd.h"
#include "launch/output/line_prefixer.h"
#include "launch/output/writer.h"

namespace lockstep::launch {

// One stream of a rank.
struct Feed {
  int rank = 0;
  bool is_error = false;  // stderr
  Fd pipe = {};
  Writer::Shared file = {};  // gets the bytes as they come; may be none
  bool shown = true;         // on the launcher's stream of the same kind
  std::string tag = {};      // before each line; "[rank N] " when empty
  // Gets the lines that hold one of `filters`, with their tags; may be none.
  Writer::Shared filtered = {};
  std::vector<std::string> filters = {};
};

// What is written goes over threads of their own (launch/output/writer.h): none of this waits for a
// reader or a disk.
class LogMultiplexer {
 public:
  static constexpr size_t kLastWords = 2048;

  LogMultiplexer();

  // Carries what a rank writes into its pipes to its destinations.
  void attach(Feed feed);
  // What the rank wrote last to its stderr, as far as that passed here: at most kLastWords bytes.
  std::string last_words(int rank) const;
  // A line of the launcher's own, on stderr.
  void say(std::string_view text);
  // Writes a file; then prints `note`, or why it could not be written.
  void write_file(const std::string& path, std::string_view text, std::string note);

  // What poll() has to wait for.
  void await(std::vector<pollfd>& events) const;
  // Reads what is there, of the streams whose readers and files keep up.
  void pump();
  // When no rank is left: reads what the pipes still hold, ends unfinished lines, and closes the
  // pipes.
  void finish();

  // Of what was read: bytes that are not written yet.
  size_t pending() const;
  // To be woken up by each byte that is written, until pump().
  void await_progress() { bell_->awaited = true; }
  // Counts what is pending as lost, except what stderr still takes. Returns the bytes, by where
  // they were to go: "7 bytes for stdout".
  std::string drop_pending();
  // The reader of stdout has gone.
  bool is_abandoned() const { return out_->target->is_abandoned(); }
  int64_t lost_bytes() const;
  // Where they were to go: "log files", "stdout and log files".
  std::string lost_where() const;

 private:
  // The launcher's stdout or stderr.
  struct LauncherStream {
    LauncherStream(int fd, const std::string& name, std::shared_ptr<Bell> bell);
    void add(std::string_view bytes) { writer.add(target, bytes); }
    const std::string name;
    const bool is_terminal;
    Writer::Shared target;
    Writer writer;
  };
  struct Stream {
    Feed feed;
    LinePrefixer lines;
    LauncherStream* destination;
    LinePrefixer bare{"", LinePrefixer::Target::File};  // for the filters
  };
  static bool is_capable(const LauncherStream& destination);
  static std::string tag_of(const Feed& feed);
  static LinePrefixer lines_of(const Feed& feed, const LauncherStream& destination);
  bool is_held_up(const Stream& stream) const;
  std::vector<Writer*> writers() const;
  // Whether there may be more.
  bool read_once(Stream& stream);
  void keep(Stream& stream, std::string_view bytes);
  // What passes the filters.
  void keep_some(const Stream& stream, std::string_view lines);

  std::shared_ptr<Bell> bell_;
  std::shared_ptr<LauncherStream> out_, err_;  // one, when both are the same file
  std::unique_ptr<Writer> files_;
  std::vector<Stream> streams_;
  std::map<int, std::string> last_words_;
};

}  // namespace lockstep::launch
