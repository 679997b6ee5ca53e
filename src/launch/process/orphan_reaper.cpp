#include "launch/process/orphan_reaper.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cctype>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>

#include "launch/process/descendants.h"
#include "launch/process/descriptors.h"
#include "launch/process/secret.h"

namespace lockstep::launch {
namespace {

constexpr int kRounds = 50;              // a second in all
constexpr useconds_t kBetween = 20'000;  // for what was in the middle of a fork()
constexpr char kWell = 'x';

bool has(const std::string& path, const std::string& variable) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << '\0' << file.rdbuf();
  return text.str().find('\0' + variable + '\0') != std::string::npos;
}

// Kills every process with the variable; returns how many there were.
int kill_marked(const std::string& variable) {
  int found = 0;
  const std::unique_ptr<DIR, int (*)(DIR*)> proc(opendir("/proc"), closedir);
  while (const dirent* entry = proc ? readdir(proc.get()) : nullptr) {
    if (!isdigit(static_cast<unsigned char>(entry->d_name[0]))) continue;
    const auto pid = static_cast<pid_t>(std::atoi(entry->d_name));
    if (pid == getpid() || process_state(pid) == 'Z') continue;
    if (!has(std::string("/proc/") + entry->d_name + "/environ", variable)) continue;
    ++found;
    kill(pid, SIGKILL);
  }
  return found;
}

[[noreturn]] void watch(int alive, const std::string& variable) {
  setsid();
  // A launcher that is a rank's, as in a job that starts jobs, has the outer job's mark, whose
  // reaper would kill this one beside the launcher and leave what that one's ranks have started.
  conceal(OrphanReaper::kVariable);
  prctl(PR_SET_NAME, "lockstep-reaper");
  for (int number = 1; number < NSIG; ++number) signal(number, SIG_IGN);
  // Of the launcher's descriptors only the pipe stays open: a reader that waits for the end of its
  // output must not wait for this process.
  if (alive != STDIN_FILENO) dup2(alive, STDIN_FILENO);
  close_from(STDIN_FILENO + 1);
  char end = 0;
  ssize_t got;
  do {
    got = read(STDIN_FILENO, &end, 1);
  } while (got < 0 && errno == EINTR);
  if (got == 0) {
    for (int round = 0, none = 0; round < kRounds && none < 2; ++round) {
      none = kill_marked(variable) == 0 ? none + 1 : 0;
      usleep(kBetween);
    }
  }
  _exit(0);
}

}  // namespace

OrphanReaper::OrphanReaper(const std::string& mark) {
  std::array<int, 2> ends;
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return;
  Fd reading(ends[0]);
  alive_ = Fd(ends[1]);
  const std::string variable = std::string(kVariable) + "=" + mark;
  // Without an exit signal waitpid(-1) does not wait for it.
  const long pid = syscall(SYS_clone, 0UL, nullptr, nullptr, nullptr, 0UL);
  if (pid == 0) {
    close(ends[1]);
    watch(ends[0], variable);
  }
  pid_ = static_cast<pid_t>(pid);
  if (pid_ > 0) leave_out(pid_);
}

OrphanReaper::~OrphanReaper() {
  if (pid_ <= 0) return;
  [[maybe_unused]] const ssize_t written = write(alive_.get(), &kWell, 1);
  // It has nothing left to do; SIGKILL also ends it where it was stopped.
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, __WCLONE);
}

}  // namespace lockstep::launch
