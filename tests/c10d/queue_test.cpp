// What the queue of collectives says of one that is held back for too long.
#include "c10d/queue.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

namespace lockstep::c10d_backend {
namespace {

using std::chrono::seconds;
using WorkPtr = c10::intrusive_ptr<BackendWork>;
using Clock = std::chrono::steady_clock;

WorkPtr operation(uint64_t number, Place scope = {}) {
  auto work = c10::make_intrusive<BackendWork>(
      nullptr, 0,
      BackendWork::Call{
          .type = ::c10d::OpType::ALLREDUCE, .number = number, .timeout = seconds(5)});
  if (!scope.empty())
    work->set_scopes(std::make_shared<Scopes>(Scopes{{.place = std::move(scope)}}));
  return work;
}

struct Held : testing::Test {
  // Held back by the callbacks of `first`.
  Held() {
    queue.give_place(*first);
    add(held, seconds(5));
  }
  void add(const WorkPtr& work, seconds until) {
    queue.add({.work = work, .deadline = start + until});
  }
  std::string overdue(Clock::duration after) {
    return queue.overdue(start + after).value_or("nothing");
  }

  const Clock::time_point start = Clock::now();
  const WorkPtr first = operation(1), held = operation(2);
  Queue queue;
};

TEST_F(Held, SaysWhetherTheOperationIsOverWhoseCallbacksItAwaits) {
  const std::string text =
      "operation 2 of the group (ALLREDUCE) was held back for 5000 ms by the callbacks of "
      "operation 1 (ALLREDUCE), which have not returned";
  for (int second = 1; second < 5; ++second) EXPECT_EQ(overdue(seconds(second)), "nothing");
  EXPECT_EQ(overdue(seconds(5)), text + ": that operation is not over");
  first->settle(nullptr);
  EXPECT_EQ(overdue(seconds(5)), text);
}

// The callback of the first has started two: the latter, which waits for the former's callbacks,
// goes before the program's.
TEST_F(Held, NamesWhatHoldsBackTheOneWhoseDeadlineHasPassed) {
  const WorkPtr inner = operation(3, first->place());
  queue.give_place(*inner);
  add(operation(4, first->place()), seconds(60));
  for (int second = 1; second < 5; ++second) EXPECT_EQ(overdue(seconds(second)), "nothing");
  const std::string text = overdue(seconds(5));
  EXPECT_NE(text.find("operation 2 of"), std::string::npos) << text;
  EXPECT_NE(text.find("the callbacks of operation 1 ("), std::string::npos) << text;
}

TEST_F(Held, TheTimeForWhichTheProcessWasStoppedIsGivenBack) {
  EXPECT_EQ(overdue(seconds(1)), "nothing");
  EXPECT_LE(queue.next_look(), start + seconds(2));
  EXPECT_EQ(overdue(seconds(100)), "nothing");
  EXPECT_EQ(overdue(seconds(101)), "nothing");
  EXPECT_EQ(overdue(seconds(102)), "nothing");
  EXPECT_NE(overdue(seconds(103)), "nothing");
}

// Nobody looks at a queue that is empty.
TEST(Queue, TheTimeBeforeItsFirstIsNotGivenBack) {
  Queue queue;
  const WorkPtr first = operation(1);
  queue.give_place(*first);
  const auto now = Clock::now() + seconds(1);
  EXPECT_FALSE(queue.overdue(now - seconds(100)));
  queue.add({.work = operation(2), .deadline = now});
  EXPECT_TRUE(queue.overdue(now));
}

}  // namespace
}  // namespace lockstep::c10d_backend
