// Threads of the library's own, and the signals of the process that it runs in.
#include "core/process/thread.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

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

}  // namespace
}  // namespace lockstep
