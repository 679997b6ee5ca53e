// Where the ranks' code was: on the failure page, and when somebody asks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <regex>
#include <string>
#include <vector>

#include "launch/diagnosis/symbols.h"
#include "launch/job.h"
#include "support/folder.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::Not;

// The sanitizers' own handlers would take the place of ours.
const std::map<std::string, std::string> kPlain = {{"ASAN_OPTIONS", "handle_segv=0"},
                                                   {"TSAN_OPTIONS", "handle_segv=0"}};

TEST(Stack, OfARankThatCrashesNamesTheFunction) {
  const test::Folder folder{test::Folder::On::Disk};
  const Result result =
      Job(rank_args("crash", {"--log-dir", folder.path()}), {.environment = kPlain}).wait();
  EXPECT_EQ(result.exit_code, 128 + SIGSEGV);
  EXPECT_THAT(result.err,
              ContainsRegex("  rank 1: \\(SIGSEGV\\) lockstep::launch::testing::read_damaged_row < "
                            "(lockstep::launch::testing::crash < )?main"));
  const size_t at = result.err.find("more in ");
  ASSERT_NE(at, std::string::npos) << result.err;
  EXPECT_THAT(
      test::contents(lines_of(result.err.substr(at + 8))[0]),
      ContainsRegex("#0  lockstep::launch::testing::.*read_damaged_row\\(int volatile\\*\\) "
                    "\\(test_launch\\+0x[0-9a-f]+\\)"));
}

TEST(Stack, ThatIsFullIsToldFromAnother) {
  const Result result = Job(rank_args("overflow"), {.environment = kPlain}).wait();
  EXPECT_EQ(result.exit_code, 128 + SIGSEGV);
  EXPECT_THAT(result.err, ContainsRegex("\\(SIGSEGV\\) lockstep::launch::testing::descend < "
                                        "lockstep::launch::testing::descend < "));
}

TEST(Stack, OfAnExceptionThatNobodyCatchesIsThatOfTheThrow) {
  for (const char* mode : {"uncaught", "kept_in"}) {
    const Result result = Job(rank_args(mode)).wait();
    EXPECT_THAT(result.err, ContainsRegex("\\(SIGABRT\\) [^< ]*refuse_row"));
  }
}

// Asks where the ranks are until the answers match all `patterns`: one that does not get a
// processor for half a second is reported without its stack. What follows the beginning of the last
// answer may still come.
bool ask_until_told(Job& job, int signal, const std::vector<std::string>& patterns) {
  const std::string begins = "where the ranks are";
  const auto begin = [&](size_t after) { return job.err().find(begins, after) + begins.size(); };
  size_t last = job.err().size(), first = std::string::npos;
  const auto is_told = [&](const std::string& pattern) {
    return std::regex_search(job.err().substr(first), std::regex(pattern));
  };
  do {
    kill(job.pid(), signal);
    if (!job.await_error(begins, last)) return false;
    last = begin(last);
    first = std::min(first, last);
  } while (!std::ranges::all_of(patterns, is_told));
  return true;
}

TEST(Stack, OfARankThatWaitsIsToldOnAFailureAndWhenAsked) {
  const test::Folder folder{test::Folder::On::Disk};
  const std::string gate = folder / "gate";
  ASSERT_EQ(mkfifo(gate.c_str(), 0600), 0);
  Job job(rank_args("stuck"), {.environment = {{"GATE", gate}}});
  ASSERT_TRUE(job.await("stuck", 2));
  // Nobody has told anything yet, and what is told now is not told again below.
  for (const int signal : {SIGUSR2, SIGQUIT}) {
    ASSERT_TRUE(ask_until_told(job, signal, {"wait_for_ever < ", "rank 1: .*stuck < main"}));
  }
  std::ofstream(gate) << "go\n";
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 7);
  const size_t at = result.err.find("their stacks, innermost function first:\n");
  ASSERT_NE(at, std::string::npos) << result.err;
  const std::string stacks = result.err.substr(at);
  EXPECT_THAT(stacks, ContainsRegex("  rank 0: .*wait_for_ever < "));
  EXPECT_THAT(stacks, Not(ContainsRegex("rank 1: [^\n]*stuck < ")));  // it ended without a signal
}

// A shell that waits for it, as timeout, strace and gdb do.
TEST(Stack, OfARankBelowAScriptIsToldToo) {
  const test::Folder folder{test::Folder::On::Disk};
  const std::string gate = folder / "gate";
  ASSERT_EQ(mkfifo(gate.c_str(), 0600), 0);
  Job job({"run", "--nproc-per-node", "2", "sh", "-c", "\"$0\" rank stuck; exit $?",
           std::filesystem::read_symlink("/proc/self/exe")},
          {.environment = {{"GATE", gate}}});
  ASSERT_TRUE(job.await("stuck", 2));
  EXPECT_TRUE(ask_until_told(job, SIGUSR2, {"wait_for_ever < "})) << job.err();
  std::ofstream(gate) << "go\n";
  EXPECT_EQ(job.wait().exit_code, 7);
}

TEST(Stack, AProgramThatDoesNotListenIsNotAsked) {
  Job job(script_args(2, "echo here; read line; exec sleep 1000"));
  ASSERT_TRUE(job.await("here", 2));
  kill(job.pid(), SIGUSR2);
  ASSERT_TRUE(job.await_error("rank 1: in no collective so far"));
  kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.wait().exit_code, 128 + SIGTERM);
}

// A program's symbol table, and every way to cut it.
TEST(Symbols, AnyBytesAreReadWithoutHarm) {
  const std::string whole = test::contents("/proc/self/exe");
  const auto reading = [](const std::string& elf) {
    return [&elf](uint64_t offset, uint64_t size) {
      return offset < elf.size() ? elf.substr(offset, size) : std::string();
    };
  };
  ASSERT_EQ(functions_at(reading(whole), {0}), std::vector<std::string>{""});
  for (size_t part = 0; part < 64; ++part) {
    const std::string cut = whole.substr(0, whole.size() * part / 64);
    EXPECT_EQ(functions_at(reading(cut), {1}).size(), 1u);
    std::string damaged = whole.substr(0, 64);
    damaged[part] = static_cast<char>(~damaged[part]);
    EXPECT_EQ(functions_at(reading(damaged), {1}), std::vector<std::string>{""});
  }
}

}  // namespace
}  // namespace lockstep::launch::testing
