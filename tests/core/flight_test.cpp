#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>

#include "core/flight/segment.h"
#include "lockstep/core/error.h"

namespace lockstep::flight {
namespace {

using ::testing::HasSubstr;

Operation operation(const char* what, int64_t count) {
  Operation made{.count = count};
  std::strncpy(made.what.data(), what, made.what.size() - 1);
  std::strncpy(made.dtype.data(), "float32", made.dtype.size() - 1);
  return made;
}

// Runs `body` in a process that is local rank `rank` of the segment's host.
void as_rank(const Segment& segment, int rank, const std::function<void()>& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    setenv(kVariable, std::to_string(segment.fd()).c_str(), 1);
    setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
    unsetenv("TORCHELASTIC_ERROR_FILE");
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
}

// A process finds its segment once; so each case is one.
TEST(Flight, WithoutALauncherNothingIsRecorded) {
  EXPECT_EXIT(
      {
        const Span span(Activity::Data);
        end(0);
        report_failure("nobody hears it");
        _exit(begin(operation("barrier", 0)) == 0 ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST(Flight, OutlivesTheRank) {
  const Segment segment(2);
  as_rank(segment, 1, [] {
    end(begin(operation("broadcast", 5)));
    const Span blocked(Activity::Communication, begin(operation("all_reduce sum", 7)));
    _exit(0);  // in the middle of it
  });
  EXPECT_EQ(segment.read(0).calls, 0u);
  EXPECT_EQ(segment.read(0).where(now_ns()), "");
  const Log log = segment.read(1);
  EXPECT_EQ(log.calls, 2u);
  ASSERT_EQ(log.last.size(), 2u);
  EXPECT_EQ(log.last[0].text(), "broadcast (float32 x 5)");
  EXPECT_GT(log.last[0].end_ns, 0u);
  EXPECT_EQ(log.last[1].end_ns, 0u);
  EXPECT_THAT(log.where(now_ns()), HasSubstr("in all_reduce sum (float32 x 7), for "));
}

TEST(Flight, KeepsTheLastThirtyTwo) {
  const Segment segment(1);
  as_rank(segment, 0, [] {
    for (int i = 1; i <= 100; ++i) end(begin(operation("all_reduce sum", i)));
  });
  const Log log = segment.read(0);
  EXPECT_EQ(log.calls, 100u);
  ASSERT_EQ(log.last.size(), kOperations);
  EXPECT_EQ(log.last.front().count, 69);
  EXPECT_EQ(log.last.back().count, 100);
  EXPECT_THAT(log.where(now_ns()), HasSubstr("in no collective; the last was all_reduce sum"));
}

// The loop of a training and a checkpoint that is written meanwhile, in groups of their own.
TEST(Flight, CallsOfSeveralThreadsHaveANumberEach) {
  const Segment segment(1);
  as_rank(segment, 0, [] {
    attach();
    std::atomic<int> ready{0};
    const auto many = [&] {
      ++ready;
      while (ready < 2) std::this_thread::yield();  // both at once
      for (int i = 0; i < 200'000; ++i) end(begin(operation("all_reduce sum", i)));
    };
    std::thread other(many);
    many();
    other.join();
  });
  EXPECT_EQ(segment.read(0).calls, 400'000u);
}

TEST(Flight, CountsTimeOfTheOutermostSpan) {
  const Segment segment(1);
  uint64_t before = now_ns();
  as_rank(segment, 0, [] {
    const Span outer(Activity::Data);
    const uint64_t until = now_ns() + 20'000'000;
    while (now_ns() < until) {
      const Span inner(Activity::Data);
    }
  });
  const uint64_t whole = now_ns() - before;
  const Log log = segment.read(0);
  EXPECT_GE(log.busy_ns[static_cast<size_t>(Activity::Data)], 20'000'000u);
  EXPECT_LE(log.busy_ns[static_cast<size_t>(Activity::Data)], whole);
  EXPECT_EQ(log.busy_ns[static_cast<size_t>(Activity::Communication)], 0u);
}

TEST(Flight, TimeOfASpanWithinAnotherBelongsToTheOuterOne) {
  const Segment segment(1);
  as_rank(segment, 0, [] {
    const uint64_t before = now_ns();
    {
      const Span outer(Activity::Checkpoint);
      const uint64_t until = now_ns() + 2'000'000;
      while (now_ns() < until) {
        const Span inner(Activity::Communication);
      }
    }
    std::thread([] {
      exclude_this_thread();
      const Span aside(Activity::Data);
    }).join();
    const auto [communication, data, saving] = own_busy_ns();
    const bool is_right =
        communication == 0 && data == 0 && saving >= 2'000'000 && saving <= now_ns() - before;
    if (!is_right) std::abort();
  });
}

TEST(Flight, TheFirstFailureStaysUnlessItWasAnEcho) {
  const Segment segment(3);
  as_rank(segment, 0, [] {
    report_failure("first");
    report_failure("second");
    report_failure("third", Blame::Peer);
  });
  as_rank(segment, 1, [] {
    report_failure("echo", Blame::Peer);
    report_failure("another echo", Blame::Peer);
  });
  as_rank(segment, 2, [] {
    report_failure("echo", Blame::Peer);
    report_failure("mine");
  });
  EXPECT_EQ(segment.read(0).failure->text, "first");
  EXPECT_EQ(segment.read(1).failure->text, "echo");
  EXPECT_EQ(segment.read(1).failure->blame, Blame::Peer);
  EXPECT_EQ(segment.read(2).failure->text, "mine");
  EXPECT_EQ(segment.read(2).failure->blame, Blame::Own);
}

TEST(Flight, KeepsTheLastComparison) {
  const Segment segment(2);
  as_rank(segment, 0, [] {
    note_comparison("pass 1: the ranks are the same");
    note_comparison("pass 2: the ranks are the same");
  });
  as_rank(segment, 1, [] { note_comparison(std::string(5000, 'x')); });
  EXPECT_EQ(segment.read(0).comparison->text, "pass 2: the ranks are the same");
  EXPECT_GT(segment.read(0).comparison->at_ns, 0u);
  EXPECT_EQ(segment.read(1).comparison->text.size(), 199u);
  EXPECT_FALSE(Segment(1).read(0).comparison.has_value());
}

TEST(Flight, ALongFailureIsCut) {
  const Segment segment(1);
  as_rank(segment, 0, [] { report_failure(std::string(5000, 'x')); });
  EXPECT_GT(segment.read(0).failure->text.size(), 500u);
}

TEST(Flight, AFailureIsToldWithoutTheBacktraceOfLibtorch) {
  const Segment segment(1);
  as_rank(segment, 0, [] {
    report_failure(
        "mat1 and mat2 cannot be multiplied\nof (4x6 and 5x3)\nException raised from meta at "
        "/pytorch/LinearAlgebra.cpp:196 (most recent call first):\nframe #0: c10::Error");
  });
  EXPECT_EQ(segment.read(0).failure->text, "mat1 and mat2 cannot be multiplied\nof (4x6 and 5x3)");
}

TEST(Flight, AVariableOfSomebodyElsesIsIgnored) {
  const Segment segment(1);
  as_rank(segment, 7, [] { _exit(begin(operation("barrier", 0)) == 0 ? 0 : 1); });
  const pid_t pid = fork();
  if (pid == 0) {
    setenv(kVariable, "987", 1);
    setenv("LOCAL_RANK", "0", 1);
    _exit(begin(operation("barrier", 0)) == 0 ? 0 : 1);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(Flight, ARankThatIsAskedSaysWhereItIs) {
  const Segment segment(2);
  as_rank(segment, 1, [] {
    attach();
    raise(question());
    raise(question());
  });
  EXPECT_TRUE(segment.listens(1));
  EXPECT_EQ(segment.stacks_told(1), 2u);
  EXPECT_EQ(segment.stacks_told(0), 0u);
  const auto stack = segment.read(1).stack;
  ASSERT_TRUE(stack.has_value());
  EXPECT_EQ(stack->signal, 0);
  ASSERT_FALSE(stack->frames.empty());
  EXPECT_THAT(stack->frames.back().module, HasSubstr("test_core"));  // _start
}

TEST(Flight, ADeadRanksStackStays) {
  const Segment segment(1);
  as_rank(segment, 0, [] {
    attach();
    // The handler, called as after a fault, so without the end that follows.
    struct sigaction own {};
    sigaction(SIGABRT, nullptr, &own);
    siginfo_t fault{};
    fault.si_code = SI_KERNEL;
    ucontext_t here{};
    own.sa_sigaction(SIGABRT, &fault, &here);
    raise(question());  // too late
  });
  const auto stack = segment.read(0).stack;
  ASSERT_TRUE(stack.has_value());
  EXPECT_EQ(stack->signal, SIGABRT);
  EXPECT_EQ(segment.stacks_told(0), 1u);
}

TEST(Flight, AProgramsOwnHandlerStays) {
  const Segment segment(1);
  as_rank(segment, 0, [] {
    std::signal(question(), SIG_IGN);
    attach();
    raise(question());
  });
  EXPECT_FALSE(segment.listens(0));
  EXPECT_EQ(segment.stacks_told(0), 0u);
}

TEST(Flight, AChildOfARankTellsNothing) {
  const Segment segment(1);
  as_rank(segment, 0, [] {
    attach();
    std::optional<Span> outer(std::in_place, Activity::Data);
    const pid_t child = fork();
    if (child == 0) {
      raise(question());
      end(begin(operation("barrier", 0)));
      report_failure("its own");
      outer.reset();
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    if (status != 0) std::abort();
  });
  EXPECT_EQ(segment.stacks_told(0), 0u);
  EXPECT_EQ(segment.read(0).calls, 0u);
  EXPECT_FALSE(segment.read(0).failure);
}

}  // namespace
}  // namespace lockstep::flight
