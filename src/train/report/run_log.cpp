// The thread that writes the log.
#include "lockstep/train/run_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <filesystem>
#include <mutex>
#include <thread>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::train {
namespace {

double unix_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Whether the file's last byte is that of a whole line; an empty file's is.
bool ends_whole(int fd) {
  const off_t size = lseek(fd, 0, SEEK_END);
  char last = '\n';
  return size <= 0 || pread(fd, &last, 1, size - 1) != 1 || last == '\n';
}

}  // namespace

// Shared with the thread, which may outlive the object when the disk hangs.
struct RunLog::State {
  struct Waiting {
    LogRecord record;
    double time;
  };

  std::string path;
  int fd = -1;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Waiting> queue;
  uint64_t appended = 0, handled = 0;
  uint64_t dropped = 0;  // since the last line that was written
  bool closing = false;

  // The thread's.
  bool whole = true;  // the file ends with a line feed
  bool warned = false;

  ~State() {
    if (fd >= 0) close(fd);
  }

  bool write_all(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t count = ::write(fd, bytes.data(), bytes.size());
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return false;
      whole = bytes[static_cast<size_t>(count) - 1] == '\n';
      bytes.remove_prefix(static_cast<size_t>(count));
    }
    return true;
  }

  // Whether all of it is there.
  bool write_line(const std::string& line) {
    if (!whole && !write_all("\n")) return false;
    return write_all(line + "\n");
  }

  void warn() {
    if (warned) return;
    warned = true;
    log::warn(
        fmt::format("[metrics] {} takes no more lines ({}); training goes on without: make "
                    "room on that disk",
                    path, std::strerror(errno)));
  }

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return closing || !queue.empty(); });
      if (queue.empty()) return;
      std::deque<Waiting> batch;
      batch.swap(queue);
      uint64_t lost = std::exchange(dropped, 0);
      lock.unlock();
      for (const auto& [record, time] : batch) {
        if (lost > 0) {
          const Event missing{.kind = "warning",
                              .text = fmt::format("{} lines of this log are missing here", lost),
                              .advice = "Make room on the log's disk, or log less often."};
          if (write_line(log_line(missing, time))) lost = 0;
        }
        if (!write_line(log_line(record, time))) {
          warn();
          ++lost;
        }
      }
      lock.lock();
      dropped += lost;
      handled += batch.size();
      changed.notify_all();
    }
  }
};

RunLog::RunLog(const std::string& path) : state_(std::make_shared<State>()) {
  State& state = *state_;
  state.path = path;
  std::error_code ignored;  // open() says it better
  const auto folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
  state.fd = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (state.fd < 0) {
    throw Error(fmt::format("[metrics] cannot write {}: {}: name another file or folder", path,
                            std::strerror(errno)));
  }
  state.whole = ends_whole(state.fd);
  thread_ = std::thread([shared = state_] { shared->run(); });
}

RunLog::~RunLog() {
  const bool is_written = flush(std::chrono::seconds(1));
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
    state_->changed.notify_all();
  }
  if (is_written) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void RunLog::append(LogRecord record) {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  ++state.appended;
  if (state.queue.size() >= kWaiting) {
    state.queue.pop_front();  // the newest say more
    ++state.dropped;
    ++state.handled;
  }
  state.queue.push_back({std::move(record), unix_now()});
  state.changed.notify_all();
}

bool RunLog::flush(std::chrono::milliseconds timeout) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  const uint64_t until = state.appended;
  return state.changed.wait_for(lock, timeout, [&] { return state.handled >= until; });
}

}  // namespace lockstep::train
