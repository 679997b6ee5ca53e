#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "core/process/stat.h"

namespace lockstep {
namespace {

// Its main thread ends, another one ends when `until` is closed.
pid_t start_without_main(const int (&until)[2]) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  close(until[1]);
  std::thread([end = until[0]] {
    char byte;
    _exit(static_cast<int>(read(end, &byte, 1)));
  }).detach();
  syscall(SYS_exit, 0);  // pthread_exit() would unwind GoogleTest, too
  __builtin_unreachable();
}

TEST(ProcessStat, AProcessWhoseMainThreadAloneHasEndedHasNot) {
  int until[2];
  ASSERT_EQ(pipe(until), 0);
  const pid_t pid = start_without_main(until);
  auto stat = process_stat(pid);
  while (stat && stat->state != 'Z') stat = process_stat(pid);
  ASSERT_TRUE(stat);
  EXPECT_TRUE(stat->has_lost_main);
  EXPECT_FALSE(stat->is_ending());

  close(until[1]);
  siginfo_t end;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(pid), &end, WEXITED | WNOWAIT), 0);
  stat = process_stat(pid);
  ASSERT_TRUE(stat);
  EXPECT_EQ(stat->state, 'Z');
  EXPECT_FALSE(stat->has_lost_main);
  EXPECT_TRUE(stat->is_ending());
  EXPECT_EQ(waitpid(pid, nullptr, 0), pid);
}

}  // namespace
}  // namespace lockstep
