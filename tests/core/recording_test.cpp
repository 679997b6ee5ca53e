// What a trace is made of: spans and calls, recorded only while they are asked for.
#include "core/flight/recording.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "support/fork.h"

namespace lockstep::flight {
namespace {

Operation operation(const char* label) {
  Operation made;
  std::strncpy(made.label.data(), label, made.label.size() - 1);
  return made;
}

void record() {
  { const Span before(Activity::Data); }
  end(begin(operation("before")));
  start_recording();
  const uint32_t first = begin(operation("first"));
  const uint32_t second = begin(operation("second"));
  EXPECT_NE(first, 0u);  // without a launcher, too
  EXPECT_NE(first, second);
  {
    const Span outer(Activity::Checkpoint);
    const Span inner(Activity::Communication, second);  // belongs to the outer one
  }
  std::thread([&] {
    const Span other(Activity::Communication, first);
    end(first);
  }).join();
  const Recording recording = stop_recording();
  { const Span after(Activity::Data); }
  end(second);

  ASSERT_EQ(recording.spans.size(), 2u);
  EXPECT_EQ(recording.spans[0].activity, Activity::Checkpoint);
  EXPECT_EQ(recording.spans[1].activity, Activity::Communication);
  EXPECT_NE(recording.spans[0].thread, recording.spans[1].thread);
  EXPECT_LE(recording.spans[0].begin_ns, recording.spans[0].end_ns);
  ASSERT_EQ(recording.calls.size(), 2u);
  EXPECT_STREQ(recording.calls[0].operation.label.data(), "first");
  EXPECT_GE(recording.calls[0].operation.end_ns, recording.calls[0].operation.start_ns);
  EXPECT_EQ(recording.calls[1].operation.end_ns, 0u);  // not over
  EXPECT_EQ(recording.left_out, 0);
  EXPECT_TRUE(stop_recording().spans.empty());
}

// A process finds out once whether it has a launcher.
TEST(FlightRecording, HasTheSpansAndCallsOfAllThreadsInIt) { test::in_a_child(record); }

}  // namespace
}  // namespace lockstep::flight
