// Threads of the library's own, and the signals of the process that it runs in.
#include "core/process/thread.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string_view>

namespace lockstep {
namespace {

TEST(ThreadWithoutSignals, LeavesThoseOfTheProcessToTheOthers) {
  sigset_t before, within, after;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  thread_without_signals([&] { pthread_sigmask(SIG_SETMASK, nullptr, &within); }).join();
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (const int number : {SIGINT, SIGTERM, SIGUSR1, SIGALRM, SIGCHLD, SIGPIPE, SIGXFSZ}) {
    EXPECT_EQ(sigismember(&within, number), 1) << number;
    EXPECT_EQ(sigismember(&after, number), sigismember(&before, number)) << number;
  }
}

// As of a file that is mapped and was cut.
TEST(ThreadWithoutSignals, ItsFaultsReachTheProgramsHandler) {
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT}) {
    const pid_t pid = fork();
    if (pid == 0) {
      std::signal(fault, [](int) { _exit(7); });
      thread_without_signals([fault] { pthread_kill(pthread_self(), fault); }).join();
      _exit(1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << fault << ": " << status;
  }
}

TEST(ThreadWithoutSignals, SaysWhichLimitToRaiseWhereThereIsNone) {
  const pid_t pid = fork();
  if (pid == 0) {
    const rlimit none{};
    setrlimit(RLIMIT_NPROC, &none);
    // Root has no such limit.
    if (geteuid() == 0 && syscall(SYS_setresuid, 65534, 65534, 65534) != 0) _exit(2);
    try {
      thread_without_signals([] {}).join();
    } catch (const std::system_error& refused) {
      const std::string_view what = refused.what();
      const bool is_said = what.find("temporarily unavailable; raise the limit (ulimit -u") !=
                           std::string_view::npos;
      _exit(is_said && refused.code() == std::errc::resource_unavailable_try_again ? 7 : 1);
    }
    _exit(3);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
}

}  // namespace
}  // namespace lockstep
