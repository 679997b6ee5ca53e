#include "lockstep/core/preemption.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lockstep/core/error.h"

// A program's own, for something else, which has the name of a function of the library.
extern "C" void on_preemption(int) {}

namespace lockstep {
namespace {

TEST(PreemptionNotice, IsReceivedOnceASignalCame) {
  const PreemptionNotice notice;
  EXPECT_FALSE(notice.received());
  raise(SIGUSR1);
  EXPECT_EQ(notice.signal(), SIGUSR1);
  raise(SIGTERM);
  EXPECT_EQ(notice.signal(), SIGTERM);
}

TEST(PreemptionNotice, TakesTheSignalsItIsGiven) {
  const PreemptionNotice notice({SIGUSR2});
  raise(SIGUSR2);
  EXPECT_EQ(notice.signal(), SIGUSR2);
}

TEST(PreemptionNotice, AnotherOneStartsAnew) {
  {
    const PreemptionNotice notice;
    raise(SIGUSR1);
  }
  EXPECT_FALSE(PreemptionNotice().received());
}

TEST(PreemptionNotice, IsReceivedThoughTheProgramHasAFunctionOfTheHandlersName) {
  const PreemptionNotice notice;
  raise(SIGUSR1);
  EXPECT_TRUE(notice.received());
}

TEST(PreemptionNotice, IsReceivedWhereTheSignalWasBlocked) {
  sigset_t given, mask;
  sigemptyset(&given);
  sigaddset(&given, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &given, nullptr);
  {
    const PreemptionNotice notice;
    raise(SIGUSR1);
    EXPECT_EQ(notice.signal(), SIGUSR1);
  }
  pthread_sigmask(SIG_UNBLOCK, &given, &mask);
  EXPECT_EQ(sigismember(&mask, SIGUSR1), 1);
  EXPECT_EQ(sigismember(&mask, SIGTERM), 0);
}

// The signal that ends a new process which does `body`; 0 when it ends by itself.
template <class Body>
int signal_that_ends(const Body& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    for (const int number : {SIGUSR1, SIGTERM}) ::signal(number, SIG_DFL);
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

TEST(PreemptionNotice, AfterItTheSignalEndsTheProcessAgain) {
  EXPECT_EQ(signal_that_ends([] {
              { const PreemptionNotice notice; }
              raise(SIGUSR1);
            }),
            SIGUSR1);
}

TEST(PreemptionNotice, WhoHasHeardIsNotKilledByTheSameWordOnTheWayOut) {
  EXPECT_EQ(signal_that_ends([] {
              {
                const PreemptionNotice notice;
                raise(SIGUSR1);
              }
              raise(SIGUSR1);
            }),
            0);
}

TEST(PreemptionNotice, AnotherSignalEndsTheProcessNevertheless) {
  EXPECT_EQ(signal_that_ends([] {
              {
                const PreemptionNotice notice;
                raise(SIGUSR1);
              }
              raise(SIGTERM);
            }),
            SIGTERM);
}

TEST(PreemptionNotice, TwoAtOnceAreRefused) {
  const PreemptionNotice notice;
  EXPECT_THROW(PreemptionNotice(), ConfigError);
}

TEST(PreemptionNotice, ASignalThatCannotBeHandledIsRefused) {
  EXPECT_THROW(PreemptionNotice({SIGUSR1, SIGKILL}), ConfigError);
  const PreemptionNotice next;  // nothing is left of the refused one
  EXPECT_FALSE(next.received());
}

}  // namespace
}  // namespace lockstep
