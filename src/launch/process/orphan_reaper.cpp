#include "launch/process/orphan_reaper.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cctype>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <system_error>

#include "launch/process/descendants.h"
#include "launch/process/descriptors.h"
#include "launch/process/secret.h"

namespace lockstep::launch {
namespace {

constexpr int kRounds = 50;              // a second in all
constexpr useconds_t kBetween = 20'000;  // for what was in the middle of a fork()
constexpr int kReadyWithin = 10'000;     // ms; it may be stopped
constexpr char kWell = 'x', kReady = 'r';

// As a thread of the process shows it; one that has ended shows none. Empty in the middle of an
// exec; nothing where it may not be read.
std::optional<std::string> environment_of(pid_t pid) {
  std::optional<std::string> found;
  std::error_code error;
  std::filesystem::directory_iterator at("/proc/" + std::to_string(pid) + "/task", error);
  for (; !error && at != decltype(at)() && (!found || found->empty()); at.increment(error)) {
    std::ifstream file(at->path() / "environ", std::ios::binary);
    if (!file) continue;
    std::ostringstream text;
    text << file.rdbuf();
    found = text.str();
  }
  return found;
}

// Kills every process with the variable. Returns how many there were, and how many may yet turn out
// to have it.
int kill_marked(const std::string& variable) {
  constexpr uint32_t kKernelThread = 0x00200000;  // PF_KTHREAD
  int found = 0;
  const std::unique_ptr<DIR, int (*)(DIR*)> proc(opendir("/proc"), closedir);
  while (const dirent* entry = proc ? readdir(proc.get()) : nullptr) {
    if (!isdigit(static_cast<unsigned char>(entry->d_name[0]))) continue;
    const auto pid = static_cast<pid_t>(std::atoi(entry->d_name));
    const auto stat = pid == getpid() ? std::nullopt : process_stat(pid);
    if (!stat || (stat->state == 'Z' && !stat->has_lost_main)) continue;
    const auto environment = environment_of(pid);
    if (!environment || (environment->empty() && (stat->flags & kKernelThread) != 0)) continue;
    const bool has_it =
        ('\0' + *environment + '\0').find('\0' + variable + '\0') != std::string::npos;
    if (has_it) kill(pid, SIGKILL);
    if (has_it || environment->empty()) ++found;
  }
  return found;
}

[[noreturn]] void watch(int alive, int ready, const std::string& variable) {
  setsid();
  // A launcher that is a rank's, as in a job that starts jobs, has the outer job's mark, whose
  // reaper would kill this one beside the launcher and leave what that one's ranks have started.
  conceal(OrphanReaper::kVariable);
  prctl(PR_SET_NAME, "lockstep-reaper");
  for (int number = 1; number < NSIG; ++number) signal(number, SIG_IGN);
  [[maybe_unused]] const ssize_t told = write(ready, &kReady, 1);
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
  std::array<int, 2> ends, ready_ends;
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return;
  const Fd reading(ends[0]);
  alive_ = Fd(ends[1]);
  if (pipe2(ready_ends.data(), O_CLOEXEC) != 0) return;
  const Fd ready(ready_ends[0]);
  Fd say_ready(ready_ends[1]);
  const std::string variable = std::string(kVariable) + "=" + mark;
  // Without an exit signal waitpid(-1) does not wait for it.
  const long pid = syscall(SYS_clone, 0UL, nullptr, nullptr, nullptr, 0UL);
  if (pid == 0) {
    close(ends[1]);
    watch(ends[0], ready_ends[1], variable);
  }
  pid_ = static_cast<pid_t>(pid);
  if (pid_ > 0) leave_out(pid_);
  // No rank starts before it has hidden the mark of an outer job, or was killed for it.
  say_ready.reset();
  pollfd event = {ready.get(), POLLIN, 0};
  poll(&event, 1, kReadyWithin);
}

OrphanReaper::~OrphanReaper() {
  if (pid_ <= 0) return;
  [[maybe_unused]] const ssize_t written = write(alive_.get(), &kWell, 1);
  // It has nothing left to do; SIGKILL also ends it where it was stopped.
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, __WCLONE);
}

}  // namespace lockstep::launch
