// What cannot be started, or is asked for wrongly: one clear error, before any rank runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "launch/job.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
namespace fs = std::filesystem;

class StartTest : public ::testing::Test {
 protected:
  std::string folder_ = ::testing::TempDir() + "lockstep-start-XXXXXX";

  StartTest() { folder_ = mkdtemp(folder_.data()); }
  ~StartTest() override { fs::remove_all(folder_); }

  std::string file(const std::string& content, mode_t mode) {
    const std::string path = folder_ + "/program";
    std::ofstream(path) << content;
    chmod(path.c_str(), mode);
    return path;
  }

  // One line that begins with the program's name, and the exit status.
  void expect_refused(const std::string& program, int exit_code, const std::string& reason) {
    const Result result = Job({"run", "--nproc-per-node", "2", program}).wait();
    EXPECT_EQ(result.exit_code, exit_code);
    EXPECT_EQ(lines_of(result.err).size(), 1u) << result.err;
    EXPECT_THAT(result.err, StartsWith("lockstep: [run] cannot start '"));
    EXPECT_THAT(result.err, HasSubstr(reason));
    EXPECT_EQ(result.out, "");
  }
};

TEST_F(StartTest, NoSuchProgramInPath) {
  expect_refused("no-such-program-anywhere", 127, "no such program in PATH");
}
TEST_F(StartTest, NoSuchFile) { expect_refused(folder_ + "/x", 127, "No such file or directory"); }
TEST_F(StartTest, EmptyName) { expect_refused("", 127, "the name is empty"); }
TEST_F(StartTest, Directory) { expect_refused(folder_, 126, "it is a directory"); }
TEST_F(StartTest, NotExecutable) {
  expect_refused(file("#!/bin/sh\n", 0644), 126, "permission denied; if it is a program: chmod +x");
}
TEST_F(StartTest, MissingInterpreter) {
  expect_refused(file("#! /no/such/python -u\n", 0755), 126, "asks for '/no/such/python'");
}
TEST_F(StartTest, DamagedBinary) {
  expect_refused(file("\x7f"
                      "ELF damaged",
                      0755),
                 126, "built for another kind of machine");
}

TEST_F(StartTest, AScriptWithoutFirstLineRunsInTheShell) {
  EXPECT_EQ(Job({"run", file("echo $1", 0755), "argument"}).wait().out, "argument\n");
}

TEST_F(StartTest, AProgramIsFoundInPath) {
  const std::string path = file("#!/bin/sh\necho found as $0\n", 0755);
  const Result result =
      Job({"run", "program"}, {.environment = {{"PATH", "/no/such:" + folder_ + ":/usr/bin"}}})
          .wait();
  EXPECT_EQ(result.out, "found as " + path + "\n");
}

void expect_usage_error(const std::vector<std::string>& args, const std::string& reason) {
  const Result result = Job(args).wait();
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(lines_of(result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err, HasSubstr(reason));
}

TEST(Flags, AnUnknownOneNamesTheNearest) {
  expect_usage_error({"run", "--nproc_per_nod", "2", "true"},
                     "unknown flag --nproc_per_nod; the nearest is --nproc_per_node");
  expect_usage_error({"run", "--nprocs=2", "true"}, "the nearest is --nproc-per-node");
}
TEST(Flags, AnUnknownCommandNamesTheNearest) {
  expect_usage_error({"runn"}, "unknown command 'runn'; the nearest is run");
}
TEST(Flags, NoProgram) { expect_usage_error({"run"}, "no program given"); }
TEST(Flags, NoValue) { expect_usage_error({"run", "--nproc-per-node"}, "--nproc-per-node"); }
TEST(Flags, WrongCounts) {
  for (const std::string count : {"0", "-1", "two", "1.5", "", "99999999999"}) {
    expect_usage_error({"run", "--nproc-per-node=" + count, "true"}, "--nproc-per-node");
  }
}
TEST(Flags, WrongPort) { expect_usage_error({"run", "--master-port", "65536", "true"}, "65536"); }
TEST(Flags, WrongGrace) { expect_usage_error({"run", "--grace", "-1", "true"}, "--grace"); }
TEST(Flags, GpusAreRefusedWhereThereAreNone) {
  const Result result = Job({"run", "--nproc-per-node", "gpu", "true"},
                            {.environment = {{"CUDA_VISIBLE_DEVICES", ""}}})
                            .wait();
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("no NVIDIA device is visible here"));
}
TEST(Flags, SeveralHostsNeedAPlaceToMeetAndASecret) {
  expect_usage_error({"run", "--nnodes=2", "true"}, "--rdzv-endpoint HOST:PORT");
  expect_usage_error({"run", "--nnodes=2", "--rdzv-endpoint=localhost", "true"},
                     "openssl rand -hex 32");
}
TEST(Flags, WrongWordsAboutHostsAreNamed) {
  expect_usage_error({"run", "--nnodes=0", "true"}, "--nnodes '0'");
  expect_usage_error({"run", "--nnodes=3:2", "true"}, "--nnodes '3:2'");
  expect_usage_error({"run", "--rdzv-backend=etcd", "true"}, "--rdzv-backend etcd");
  expect_usage_error({"run", "--rdzv-conf=join_timeout", "true"}, "KEY=VALUE");
  expect_usage_error({"run", "--rdzv-conf=join_timeouts=3", "true"}, "known are join_timeout");
  expect_usage_error({"run", "--rdzv-conf=join_timeout=soon", "true"}, "give seconds");
  expect_usage_error({"run", "--rdzv-conf=heartbeat_timeout=1,keep_alive_interval=0.9", "true"},
                     "two heartbeats within the time-out");
  expect_usage_error({"run", "--nnodes=2", "--node-rank=2", "true"}, "they count from 0");
  expect_usage_error({"run", "--nnodes=2", "--print-env", "true"}, "leave --nnodes out");
}
TEST(Flags, OneHostNeedsNoRendezvousWhateverIsSaidAboutIt) {
  EXPECT_EQ(Job({"run", "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
                 "--node_rank=0", "--master-addr=localhost", "echo", "x"})
                .wait()
                .out,
            "x\n");
}
TEST(Flags, WhatIsOnlyForPythonIsRefusedByName) {
  expect_usage_error({"run", "--run-path", "true"},
                     "--run-path (or PET_RUN_PATH) is not supported: "
                     "it is about Python programs");
  expect_usage_error({"run", "-m", "true"}, "--module");
  expect_usage_error({"run", "--logs_specs=x", "true"}, "--logs-specs x");
  expect_usage_error({"run", "--event-log-handler=console", "true"}, "what works: null");
}
TEST(Flags, TorchrunsThatChangeNothingHereAreAccepted) {
  EXPECT_EQ(Job({"run", "--monitor-interval=5", "--start-method", "spawn", "--use-env", "-r0", "-t",
                 "0", "echo", "x"})
                .wait()
                .out,
            "x\n");
  expect_usage_error({"run", "--monitor_interval=0", "true"}, "--monitor-interval");
}

TEST(Flags, BothSpellingsAndTorchrunsHarmlessOnes) {
  for (const char* flag : {"--nproc-per-node=2", "--nproc_per_node=2"}) {
    const Result result =
        Job({"run", "--standalone", "--nnodes=1", "--no_python", flag, "echo", "x"}).wait();
    EXPECT_EQ(lines_of(result.out).size(), 2u) << result.err;
  }
}
TEST(Flags, VariablesStandInForThem) {
  const Result result =
      Job({"run", "echo", "x"}, {.environment = {{"PET_NPROC_PER_NODE", "3"}}}).wait();
  EXPECT_EQ(lines_of(result.out).size(), 3u);
}
TEST(Flags, CpuIsOneRankPerCore) {
  const std::string script = "echo $WORLD_SIZE $(env -u OMP_NUM_THREADS nproc)";
  for (const std::string& line :
       lines_of(Job({"run", "--nproc-per-node=cpu", "sh", "-c", script}).wait().out)) {
    const std::string numbers = line.starts_with('[') ? line.substr(line.find("] ") + 2) : line;
    const size_t space = numbers.find(' ');
    EXPECT_EQ(numbers.substr(0, space), numbers.substr(space + 1));
  }
}
TEST(Flags, ThoseAfterTheProgramAreItsOwn) {
  EXPECT_EQ(Job({"run", "echo", "--nproc_per_node", "3", "--", "-x"}).wait().out,
            "--nproc_per_node 3 -- -x\n");
  EXPECT_EQ(Job({"run", "--nproc-per-node", "1", "--", "printf", "%s", "--help"}).wait().out,
            "--help");
}
TEST(Flags, HelpAndVersionAreNoErrors) {
  EXPECT_THAT(Job({"run", "--help"}).wait().out,
              HasSubstr("Usage: lockstep run [FLAGS] PROGRAM [ARGS]"));
  const Result version = Job({"--version"}).wait();
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_THAT(version.out, StartsWith("lockstep "));
}

}  // namespace
}  // namespace lockstep::launch::testing
