#include "launch/diagnosis/threads.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "core/files/fd.h"

namespace lockstep::launch {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::Matches;
using ::testing::StartsWith;

TEST(WaitsOfThreads, NamesThemAndWhatTheKernelHasThemWaitIn) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const Fd read_end(ends[0]);
  Fd write_end(ends[1]);
  prctl(PR_SET_NAME, "asking");
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      prctl(PR_SET_NAME, "reader");
      char byte;
      EXPECT_EQ(read(read_end.get(), &byte, 1), 0);
    });
  }
  // Where the kernel says no function, its state. A sanitizer's own thread, which starts with the
  // first reader, has the name of the one that asks.
  const auto expected = AllOf(StartsWith("asking runs"),
                              ContainsRegex(", reader in ([a-z_]*pipe[a-z_]*|state S) \\(2\\)"));
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  std::string text;
  do {
    text = waits_of_threads(getpid());
  } while (!Matches(expected)(text) && std::chrono::steady_clock::now() < deadline);
  EXPECT_THAT(text, expected);
  write_end.reset();
  for (std::thread& reader : readers) reader.join();
  EXPECT_THAT(waits_of_threads(getpid()), StartsWith("asking runs"));
}

TEST(WaitsOfThreads, SaysNothingOfAProcessThatIsNotThere) { EXPECT_EQ(waits_of_threads(-1), ""); }

}  // namespace
}  // namespace lockstep::launch
