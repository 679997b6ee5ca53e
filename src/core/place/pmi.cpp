// PMI-1, the protocol between MPICH's mpirun and what it starts: "cmd=... key=value ..." in lines,
// one answer to each (MPICH's src/pmi, and `cmd=` lines of hydra's -verbose).
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "core/place/exchange.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kLongestLine = 4096;
constexpr const char* kKey = "lockstep-meeting";

class Connection {
 public:
  Connection(int fd, std::chrono::milliseconds timeout)
      : fd_(fd), timeout_(timeout), until_(Clock::now() + timeout) {}

  // The value of `key` in the answer, which has to be the command `answer`.
  std::string ask(const std::string& line, const char* answer, const char* key) {
    tell(line + "\n");
    const std::string text = " " + hear();
    if (value_of(text, "cmd") != answer || value_of(text, "rc").value_or("0") != "0") {
      refuse(fmt::format("answered '{}' to '{}'", text.substr(1), line));
    }
    const auto value = value_of(text, key);
    if (!value) refuse(fmt::format("answered '{}' to '{}', without {}", text.substr(1), line, key));
    return *value;
  }

 private:
  static std::optional<std::string> value_of(const std::string& text, const char* key) {
    const std::string mark = fmt::format(" {}=", key);
    const size_t at = text.find(mark);
    if (at == std::string::npos) return std::nullopt;
    const size_t begin = at + mark.size();
    return text.substr(begin, text.find(' ', begin) - begin);
  }

  void tell(const std::string& line) {
    if (send(fd_, line.data(), line.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(line.size())) {
      refuse(fmt::format("does not listen: {}", std::strerror(errno)));
    }
  }

  // Byte by byte: what follows the line belongs to the next answer.
  std::string hear() {
    std::string line;
    for (char c = 0; line.size() < kLongestLine;) {
      await_byte();
      if (read(fd_, &c, 1) != 1) refuse("has closed the connection");
      if (c == '\n') return line;
      line += c;
    }
    refuse("answers without end");
  }

  void await_byte() {
    for (;;) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(until_ - Clock::now());
      pollfd event{fd_, POLLIN, 0};
      if (left.count() > 0 && poll(&event, 1, static_cast<int>(left.count())) > 0) return;
      if (left.count() <= 0) {
        refuse(fmt::format("has not answered within {:g} s: is every rank the same program?",
                           static_cast<double>(timeout_.count()) * 1e-3));
      }
    }
  }

  [[noreturn]] static void refuse(const std::string& what) {
    throw CommError(
        fmt::format("[environment] mpirun's process manager (PMI_FD) {}; set MASTER_ADDR and "
                    "MASTER_PORT for all ranks to do without it",
                    what));
  }

  const int fd_;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point until_;
};

}  // namespace

std::string exchange_over_pmi(int fd, const std::string& word, std::chrono::milliseconds timeout) {
  Connection manager(fd, timeout);
  manager.ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init", "pmi_version");
  const std::string space = manager.ask("cmd=get_my_kvsname", "my_kvsname", "kvsname");
  if (!word.empty()) {
    manager.ask(fmt::format("cmd=put kvsname={} key={} value={}", space, kKey, word), "put_result",
                "rc");
  }
  manager.ask("cmd=barrier_in", "barrier_out", "cmd");
  const std::string heard =
      manager.ask(fmt::format("cmd=get kvsname={} key={}", space, kKey), "get_result", "value");
  // A process that ends without finalize counts as failed.
  manager.ask("cmd=finalize", "finalize_ack", "cmd");
  return heard;
}

}  // namespace lockstep
