// What is written behind a training's back, and what of it is left when the process ends.
#include "train/report/log/record_queue.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include "lockstep/train/run_history.h"
#include "support/folder.h"
#include "support/fork.h"
#include "train/report/log/file.h"

namespace lockstep::train {
namespace {

// Runs `end` in a process that has just appended reports to a log, and whose disk is slow: the
// thread has written none of them by then. Returns how the process ended.
int dying(const std::string& path, const std::function<void()>& end) {
  const pid_t child = fork();
  if (child == 0) {
    // Not what the test's process has to say.
    for (const int stream : {STDOUT_FILENO, STDERR_FILENO})
      dup2(open("/dev/null", O_WRONLY), stream);
    auto* const file = new LogFile(path);
    auto* const queue =  // which nobody destroys
        new RecordQueue([file](const LogRecord& record, double unix_seconds, uint64_t missing) {
          usleep(10'000);
          file->take(record, unix_seconds, missing);
        });
    for (int64_t step = 1; step <= 5; ++step) queue->append(StepReport{.step = step});
    end();
    _exit(77);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

class EndOfAProcess : public testing::Test {
 protected:
  void expect_all() const { EXPECT_EQ(read_run(path_).reports, 5); }
  test::Folder folder_;
  std::string path_ = folder_ / "run/metrics.jsonl";
};

TEST_F(EndOfAProcess, ByExit) {
  const int status = dying(path_, [] { std::exit(3); });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 3) << status;
  expect_all();
}

TEST_F(EndOfAProcess, ByAbort) {
  const int status = dying(path_, [] { std::abort(); });
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT) << status;
  expect_all();
}

TEST_F(EndOfAProcess, ByAnExceptionThatNobodyCatches) {
  const int status =
      dying(path_, [] { std::thread([] { throw std::runtime_error("broken"); }).join(); });
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT) << status;
  expect_all();
}

TEST_F(EndOfAProcess, ByAFault) {
  const int status = dying(path_, [] { raise(SIGSEGV); });
  // A sanitizer's handler of the signal reports it and exits.
  const int exit_status = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
  EXPECT_TRUE((WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) ||
              (exit_status != 0 && exit_status != 77))
      << status;
  expect_all();
}

TEST_F(EndOfAProcess, AChildHasNothingToWaitFor) {
  const int status = dying(path_, [] {
    const pid_t child = fork();
    if (child == 0) std::exit(4);
    int of_child = 0;
    waitpid(child, &of_child, 0);
    std::exit(WEXITSTATUS(of_child));
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 4) << status;
  expect_all();
}

TEST(RecordQueue, IsLeftAtOnceInAChild) {
  std::atomic<bool> goes_on{false};
  std::atomic<int> taken = 0;
  std::optional<RecordQueue> queue([&](const LogRecord&, double, uint64_t) {
    while (!goes_on) usleep(100);
    ++taken;
  });
  queue->append(StepReport{.step = 1});
  test::in_a_child([&] {
    queue->append(StepReport{.step = 2});
    EXPECT_TRUE(queue->flush(std::chrono::seconds(1))) << "waited for a thread that is not there";
    std::thread own([] {});  // in the memory of the parent's
    queue.reset();
    EXPECT_NO_THROW(own.join());
  });
  goes_on = true;
  EXPECT_TRUE(queue->flush());
  EXPECT_EQ(taken, 1);
}

TEST(RecordQueue, DropsTheOldestOfVeryManyAndSaysHowMany) {
  int64_t taken = 0, missing = 0, last = 0;
  bool is_first = true;
  {
    std::atomic<bool> begun{false}, goes_on{false};
    RecordQueue queue([&](const LogRecord& record, double, uint64_t lost) {
      begun = true;
      while (is_first && !goes_on) usleep(100);
      is_first = false;
      ++taken;
      missing += static_cast<int64_t>(lost);
      last = std::get<StepReport>(record).step;
    });
    queue.append(StepReport{.step = 0});
    while (!begun) usleep(100);
    constexpr auto kMany = static_cast<int64_t>(RecordQueue::kWaiting) + 10;
    for (int64_t step = 1; step <= kMany; ++step) queue.append(StepReport{.step = step});
    goes_on = true;
    EXPECT_TRUE(queue.flush());
    EXPECT_EQ(last, kMany);
  }
  EXPECT_EQ(missing, 10);
  EXPECT_EQ(taken, 1 + static_cast<int64_t>(RecordQueue::kWaiting));
}

}  // namespace
}  // namespace lockstep::train
