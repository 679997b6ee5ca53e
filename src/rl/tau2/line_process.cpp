#include "rl/tau2/line_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "lockstep/rl/environment.h"

extern char** environ;

namespace lockstep::rl {
namespace {

constexpr size_t kMostBytes = size_t{16} << 20;
constexpr size_t kLastWords = 2000;
constexpr off_t kMostWords = 1 << 20;

using Clock = std::chrono::steady_clock;

// Waits until the socket is ready; false when the time is over.
bool is_ready(int socket, short events, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd waited{.fd = socket, .events = events, .revents = 0};
    const int ready = poll(&waited, 1, static_cast<int>(std::min<int64_t>(left, 1 << 30)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
  }
}

// This thread's mask, and the signals of a PreemptionNotice: who sends one to this process may send
// it to all processes of the job, while this one plays on until it has saved.
sigset_t mask_with_notices() {
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  sigaddset(&mask, SIGTERM);
  sigaddset(&mask, SIGUSR1);
  return mask;
}

}  // namespace

LineProcess::LineProcess(const std::vector<std::string>& command) {
  std::array<int, 2> ends;
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    throw EnvironmentError(fmt::format("[tau2] no socket: {}", std::strerror(errno)));
  }
  socket_ = Fd(ends[0]);
  const Fd other(ends[1]);
  errors_ = Fd(memfd_create("lockstep-tau2-stderr", MFD_CLOEXEC));
  fcntl(errors_.get(), F_SETFL, O_APPEND);
  std::vector<char*> arguments;
  for (const auto& part : command) arguments.push_back(const_cast<char*>(part.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  // It ends when its input does, so that it does not outlive this process.
  posix_spawn_file_actions_adddup2(&actions, other.get(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, other.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors_.get(), STDERR_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  const sigset_t blocked = mask_with_notices();
  posix_spawnattr_setsigmask(&attributes, &blocked);
  const int error =
      posix_spawnp(&pid_, arguments[0], &actions, &attributes, arguments.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    pid_ = -1;
    throw EnvironmentError(
        fmt::format("[tau2] cannot start {}: {}", command.front(), std::strerror(error)));
  }
}

LineProcess::~LineProcess() {
  if (pid_ < 0 || !is_own()) return;
  kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

std::string LineProcess::exchange(const std::string& line, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const auto late = [&] {
    return EnvironmentError(fmt::format("[tau2] no answer within {} ms", timeout.count()));
  };
  forget_words();
  const std::string sent = line + "\n";
  for (size_t at = 0; at < sent.size();) {
    if (!is_ready(socket_.get(), POLLOUT, deadline)) throw late();
    const ssize_t count =
        send(socket_.get(), sent.data() + at, sent.size() - at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      at += static_cast<size_t>(count);
    } else if (errno != EINTR && errno != EAGAIN) {
      throw EnvironmentError(
          fmt::format("[tau2] the process has ended ({})", std::strerror(errno)));
    }
  }
  while (true) {
    if (const size_t end = received_.find('\n'); end != std::string::npos) {
      std::string answer = received_.substr(0, end);
      received_.erase(0, end + 1);
      return answer;
    }
    if (received_.size() > kMostBytes) {
      throw EnvironmentError(
          fmt::format("[tau2] an answer of more than {} bytes in a line", kMostBytes));
    }
    if (!is_ready(socket_.get(), POLLIN, deadline)) throw late();
    std::array<char, 65536> buffer;
    const ssize_t count = recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (count > 0) {
      received_.append(buffer.data(), static_cast<size_t>(count));
    } else if (count == 0 || (errno != EINTR && errno != EAGAIN)) {
      throw EnvironmentError("[tau2] the process has ended");
    }
  }
}

// The file is memory. The process writes at its end, wherever that is by then.
void LineProcess::forget_words() const {
  if (lseek(errors_.get(), 0, SEEK_END) < kMostWords) return;
  static_cast<void>(ftruncate(errors_.get(), 0) == 0);
}

std::string LineProcess::last_words() const {
  const off_t size = lseek(errors_.get(), 0, SEEK_END);
  const auto from = std::max<off_t>(0, size - static_cast<off_t>(kLastWords));
  std::string text(static_cast<size_t>(std::max<off_t>(0, size - from)), '\0');
  const ssize_t count = pread(errors_.get(), text.data(), text.size(), from);
  text.resize(static_cast<size_t>(std::max<ssize_t>(0, count)));
  return text;
}

}  // namespace lockstep::rl
