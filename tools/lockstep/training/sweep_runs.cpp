#include "training/sweep_runs.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::tool {
namespace {

constexpr std::array kStops = {SIGINT, SIGTERM, SIGHUP};

sigset_t watched() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  for (const int stop : kStops) sigaddset(&set, stop);
  return set;
}

// In the child: never returns.
[[noreturn]] void become(const SweepRun& run, const std::string& log,
                         const std::map<std::string, std::string>& environment, pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(128 + SIGTERM);
  const sigset_t set = watched();
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
  std::signal(SIGXFSZ, SIG_DFL);  // the tool ignores it
  const int input = open("/dev/null", O_RDONLY);
  const int output = open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  if (input < 0 || output < 0) _exit(126);
  dup2(input, STDIN_FILENO);
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  close(input);
  close(output);
  for (const auto& [name, value] : environment) {
    if (run.has_threads && name == "OMP_NUM_THREADS") continue;
    setenv(name.c_str(), value.c_str(), 0);
  }
  std::vector<char*> words;
  words.reserve(run.command.size() + 1);
  for (const std::string& word : run.command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  execv(words.front(), words.data());
  dprintf(STDERR_FILENO, "lockstep: %s: %s\n", words.front(), std::strerror(errno));
  _exit(127);
}

}  // namespace

Children::Children() {
  const sigset_t set = watched();
  sigprocmask(SIG_BLOCK, &set, nullptr);
  // With an ignored SIGCHLD, inherited from the parent, no end of a run would be told.
  std::signal(SIGCHLD, SIG_DFL);
}

Children::~Children() {
  for (const auto& [process, index] : running_) kill(process, SIGTERM);
  for (const auto& [process, index] : running_) waitpid(process, nullptr, 0);
  const sigset_t set = watched();
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
}

void Children::start(size_t index, const SweepRun& run,
                     const std::map<std::string, std::string>& environment) {
  const std::string log = run.folder + "/log.txt";
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) {
    throw Error(fmt::format("[sweep] {} cannot be started: {}", run.name, std::strerror(errno)));
  }
  if (child == 0) become(run, log, environment, parent);
  running_[child] = index;
}

Children::Ended Children::wait() {
  const sigset_t set = watched();
  for (;;) {
    int status = 0;
    const pid_t child = waitpid(-1, &status, WNOHANG);
    const auto found = running_.find(child);
    if (child > 0 && found != running_.end()) {
      const size_t index = found->second;
      running_.erase(found);
      return {index, WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status)};
    }
    if (child > 0) continue;
    const int signal = sigwaitinfo(&set, nullptr);
    if (signal < 0 || signal == SIGCHLD) continue;
    if (signal_ == 0) signal_ = signal;
    for (const auto& [process, index] : running_) kill(process, signal);
  }
}

}  // namespace lockstep::tool
