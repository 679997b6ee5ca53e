#include "launch/output/writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "core/process/thread.h"
#include "lockstep/core/error.h"

namespace lockstep::launch {

Bell::Bell() : fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!fd) throw Error(fmt::format("[run] eventfd: {}", std::strerror(errno)));
}

void Bell::ring() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t sent = write(fd.get(), &one, sizeof one);
}

void Bell::silence() const {
  uint64_t count;
  [[maybe_unused]] const ssize_t got = read(fd.get(), &count, sizeof count);
}

Writer::Target::Target(int fd, std::string name) : borrowed_(fd), name_(std::move(name)) {}

Writer::Target::Target(Fd file, std::string name)
    : owned_(std::move(file)), name_(std::move(name)) {}

Writer::Target::Target(std::string path) : name_(std::move(path)), by_path_(true) {}

int Writer::Target::open() {
  if (by_path_ && !owned_) {
    owned_ = Fd(::open(name_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  }
  if (at_once_ == 0 && fd() >= 0) {
    struct stat status;
    // A longer write to a pipe may block after a part of it, which would count as not written.
    at_once_ = fstat(fd(), &status) == 0 && S_ISFIFO(status.st_mode) ? PIPE_BUF : kAtOnce;
  }
  return fd();
}

// Outlives the writer where its thread is stuck in a write.
struct Writer::State {
  explicit State(std::shared_ptr<Bell> its_bell) : bell(std::move(its_bell)) {}

  const std::shared_ptr<Bell> bell;
  mutable std::mutex mutex;
  std::condition_variable changed;
  // Below, under the mutex.
  std::deque<Piece> pieces;
  size_t pending = 0;  // bytes, with those that are being written
  bool busy = false, ending = false;
  int64_t lost = 0;
  std::vector<std::string> notes;

  std::thread thread;  // the owner's
};

Writer::Writer(std::shared_ptr<Bell> bell) : state_(std::make_shared<State>(std::move(bell))) {
  try {
    state_->thread = thread_without_signals([state = state_] { work(state); });
  } catch (const std::system_error& error) {
    throw Error(fmt::format("[run] no thread for the output: {}", error.what()));
  }
}

Writer::~Writer() {
  std::thread thread;
  bool stuck;
  {
    const std::lock_guard lock(state_->mutex);
    state_->ending = true;
    stuck = state_->busy;
    thread = std::move(state_->thread);
  }
  state_->changed.notify_one();
  stuck ? thread.detach() : thread.join();
}

void Writer::add(const Shared& target, std::string_view bytes, std::string note) {
  if (bytes.empty()) return;
  const std::lock_guard lock(state_->mutex);
  state_->pending += bytes.size();
  auto& pieces = state_->pieces;
  const bool fits = !pieces.empty() && pieces.back().target == target &&
                    pieces.back().note.empty() && pieces.back().bytes.size() < kAtOnce;
  if (fits) {
    pieces.back().bytes += bytes;
    pieces.back().note = std::move(note);
  } else {
    pieces.push_back({target, std::string(bytes), std::move(note)});
  }
  state_->changed.notify_one();
}

size_t Writer::pending() const {
  const std::lock_guard lock(state_->mutex);
  return state_->pending;
}

std::vector<std::string> Writer::take_notes() {
  const std::lock_guard lock(state_->mutex);
  return std::exchange(state_->notes, {});
}

int64_t Writer::lost_bytes() const {
  const std::lock_guard lock(state_->mutex);
  return state_->lost;
}

void Writer::drop_pending() {
  const std::lock_guard lock(state_->mutex);
  state_->lost += static_cast<int64_t>(std::exchange(state_->pending, 0));
  state_->pieces.clear();
  state_->ending = true;
}

void Writer::work(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  for (;;) {
    state->changed.wait(lock, [&] { return state->ending || !state->pieces.empty(); });
    if (state->ending) return;
    const Piece piece = std::move(state->pieces.front());
    state->pieces.pop_front();
    state->busy = true;
    lock.unlock();
    write_out(*state, piece);
    lock.lock();
    state->busy = false;
  }
}

void Writer::write_out(State& state, const Piece& piece) {
  Target& target = *piece.target;
  std::string_view rest = piece.bytes;
  std::string note = piece.note;
  while (!rest.empty()) {
    const size_t before = rest.size();
    const bool goes_on = !target.is_abandoned() && write_some(target, rest);
    const int error = errno;
    const std::lock_guard lock(state.mutex);
    if (state.ending) return;  // all is counted
    if (!goes_on) {
      if (!target.is_abandoned() && !std::exchange(target.failed_, true)) {
        state.notes.push_back(fmt::format("cannot write to {}: {}; the job continues without",
                                          target.name_, std::strerror(error)));
      }
      state.lost += static_cast<int64_t>(rest.size());
      rest = {};
      note.clear();
    }
    state.pending -= before - rest.size();
    const bool says = rest.empty() && !note.empty();
    if (says) state.notes.push_back(note);
    if (says || !goes_on || state.bell->awaited.exchange(false)) state.bell->ring();
  }
}

// False, with errno, when it cannot be written.
bool Writer::write_some(Target& target, std::string_view& rest) {
  const int fd = target.open();
  if (fd < 0) return false;
  const ssize_t sent = write(fd, rest.data(), std::min(rest.size(), target.at_once_));
  if (sent >= 0) {
    rest.remove_prefix(static_cast<size_t>(sent));
    return true;
  }
  if (errno == EINTR) return true;
  if (errno == EAGAIN) {  // opened as non-blocking by another process; this thread waits
    pollfd event{fd, POLLOUT, 0};
    poll(&event, 1, -1);
    return true;
  }
  if (errno == EPIPE || errno == ECONNRESET || errno == EIO) {
    const int error = errno;
    struct stat status;
    // A disk's EIO is not a reader that has left.
    if (fstat(fd, &status) == 0 && !S_ISREG(status.st_mode)) target.abandoned_ = true;
    errno = error;
  }
  return false;
}

}  // namespace lockstep::launch
