// Writes to files, pipes and terminals on a thread of its own. The launcher's other thread sends
// heartbeats, handles signals and watches the ranks; it never waits for a reader or a disk.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/files/fd.h"

namespace lockstep::launch {

// Wakes the thread that owns one or several writers.
struct Bell {
  Bell();
  void ring() const;
  void silence() const;

  Fd fd;                             // readable after ring()
  std::atomic<bool> awaited{false};  // a thread waits for the next progress
};

class Writer {
 public:
  // Where bytes go. Targets of one writer wait for each other.
  class Target {
   public:
    // `fd` stays the caller's. `name`: for messages.
    Target(int fd, std::string name);
    Target(Fd file, std::string name);
    // Opened when the first bytes come: a new file, or an old one made empty.
    explicit Target(std::string path);

    int fd() const { return owned_ ? owned_.get() : borrowed_; }
    // Its reader has gone, as `| head -1` does.
    bool is_abandoned() const { return abandoned_; }

   private:
    friend class Writer;
    int open();

    const int borrowed_ = -1;
    Fd owned_;
    const std::string name_;
    const bool by_path_ = false;
    size_t at_once_ = 0;
    bool failed_ = false;  // and was reported
    std::atomic<bool> abandoned_{false};
  };
  using Shared = std::shared_ptr<Target>;

  explicit Writer(std::shared_ptr<Bell> bell);
  // Does not wait: what is not written by now is not written.
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  // Takes the bytes over. `note` is among take_notes() once they are written. A write that fails
  // loses bytes, which a note says, and nothing else.
  void add(const Shared& target, std::string_view bytes, std::string note = {});

  size_t pending() const;
  // Whether so much is pending that no more should be added for now.
  bool is_full() const { return pending() >= kFull; }
  // Errors, and the notes given to add(), for the log.
  std::vector<std::string> take_notes();
  int64_t lost_bytes() const;
  // Counts what is pending as lost; it is no longer waited for.
  void drop_pending();

 private:
  static constexpr size_t kFull = 1 << 20;
  static constexpr size_t kAtOnce = 1 << 16;

  struct Piece {
    Shared target;
    std::string bytes, note;
  };
  struct State;
  static void work(const std::shared_ptr<State>& state);
  static void write_out(State& state, const Piece& piece);
  static bool write_some(Target& target, std::string_view& rest);

  std::shared_ptr<State> state_;
};

}  // namespace lockstep::launch
