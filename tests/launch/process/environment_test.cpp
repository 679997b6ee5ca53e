// What a rank finds around it: variables, streams, descriptors.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "core/files/fd.h"
#include "launch/job.h"
#include "launch/rendezvous/host.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

// Whether somebody listens there.
bool connects(uint32_t address, int port) {
  const Fd fd(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_addr.s_addr = htonl(address);
  where.sin_port = htons(static_cast<uint16_t>(port));
  return connect(fd.get(), reinterpret_cast<sockaddr*>(&where), sizeof where) == 0;
}

TEST(Environment, RanksSeeTorchrunsVariables) {
  const Result result = run_script(
      2,
      "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE "
      "$ROLE_NAME $ROLE_RANK $ROLE_WORLD_SIZE $MASTER_ADDR $TORCHELASTIC_RESTART_COUNT "
      "$TORCHELASTIC_MAX_RESTARTS ${TORCHELASTIC_ERROR_FILE?}");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(lines_of(result.out),
              UnorderedElementsAre("[rank 0] 0 2 0 2 0 1 default 0 2 127.0.0.1 0 0",
                                   "[rank 1] 1 2 1 2 0 1 default 1 2 127.0.0.1 0 0"));
}

TEST(Environment, AnOuterLaunchersVariablesAreReplaced) {
  const Result result = run_script(1,
                                   "echo $RANK $WORLD_SIZE ${TORCHELASTIC_USE_AGENT_STORE-none} "
                                   "${TORCHELASTIC_ERROR_FILE:-none}",
                                   {.environment = {{"RANK", "7"},
                                                    {"WORLD_SIZE", "9"},
                                                    {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                    {"TORCHELASTIC_ERROR_FILE", "/tmp/x"}}});
  EXPECT_EQ(result.out, "0 1 none none\n");
}

TEST(Environment, RunIdIsTheGivenOneOrDiffersBetweenJobs) {
  const std::string script = "echo $TORCHELASTIC_RUN_ID";
  EXPECT_EQ(Job({"run", "--rdzv_id", "mine", "sh", "-c", script}).wait().out, "mine\n");
  EXPECT_NE(run_script(1, script).out, run_script(1, script).out);
}

TEST(Environment, CoresAreSharedOutAmongTheRanks) {
  const Settings unset{.environment = {{"OMP_NUM_THREADS", ""}}};
  EXPECT_EQ(run_script(1, "echo $OMP_NUM_THREADS", unset).out, std::to_string(cores()) + "\n");
  EXPECT_EQ(lines_of(run_script(cores() + 1, "echo $OMP_NUM_THREADS", unset).out)[0].back(), '1');
}

TEST(Environment, TheUsersThreadCountStays) {
  EXPECT_EQ(run_script(1, "echo $OMP_NUM_THREADS", {.environment = {{"OMP_NUM_THREADS", "3"}}}).out,
            "3\n");
}

TEST(Environment, OnlyRankZeroReadsTheLaunchersInput) {
  Job job(script_args(2, "cat; echo end"));
  job.write_input("hello\n");
  EXPECT_THAT(lines_of(job.wait().out),
              UnorderedElementsAre("[rank 0] hello", "[rank 0] end", "[rank 1] end"));
}

TEST(Environment, RankZeroInheritsASocketThatListensOnLoopbackOnly) {
  Job job(script_args(2,
                      "test $LOCKSTEP_MASTER_PORT = $MASTER_PORT || exit 1; "
                      "echo $RANK ${LOCKSTEP_STORE_FD:+has-store} port=$MASTER_PORT; cat"));
  ASSERT_TRUE(job.await("port=", 2));
  ASSERT_TRUE(job.await("[rank 0] 0 has-store port="));
  EXPECT_THAT(job.out(), HasSubstr("[rank 1] 1 port="));
  const int port = std::atoi(job.out().substr(job.out().find("port=") + 5).c_str());
  EXPECT_TRUE(connects(INADDR_LOOPBACK, port));
  EXPECT_FALSE(connects(INADDR_LOOPBACK + 1, port));  // 127.0.0.2
}

TEST(Environment, ThePortIsGoneWithRankZero) {
  Job job(script_args(2, "echo port=$MASTER_PORT; read x; test $RANK = 0 || sleep 1000"));
  ASSERT_TRUE(job.await("port=", 2));
  const int port = std::atoi(job.out().substr(job.out().find("port=") + 5).c_str());
  job.write_input("go\n");
  while (connects(INADDR_LOOPBACK, port)) {
  }
}

TEST(Environment, AMasterPortThatIsGivenIsUsed) {
  Job first(script_args(2, "echo port=$MASTER_PORT; cat"));
  ASSERT_TRUE(first.await("port=", 2));
  const std::string port = first.out().substr(first.out().find("port=") + 5, 5);
  const Result refused = Job({"run", "--master-port", port, "true"}).wait();
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("--master-port " + port + ": Address already in use"));
  first.wait();
  EXPECT_EQ(Job({"run", "--master_port=" + port, "sh", "-c", "echo $MASTER_PORT"}).wait().out,
            port + "\n");
}

// torch.distributed's rank 0 binds the port itself, and fails where somebody listens there already.
TEST(Environment, ThePortIsLeftFreeForAPythonRankZero) {
  const test::Folder folder(test::Folder::On::Disk);
  const std::string look = "echo ${LOCKSTEP_STORE_FD:-none} port=$MASTER_PORT; cat";
  const auto script = [&](const std::string& name, const std::string& line) {
    const std::string path = folder / name;
    std::ofstream(path) << line << "\n" << look << "\n";
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  };
  // Programs that are called like Python's, or said to be by a script's first line.
  std::filesystem::create_symlink("/bin/sh", folder / "python3.11");
  std::filesystem::create_symlink("/bin/sh", folder / "pythonic");
  struct Case {
    std::vector<std::string> command;
    const char* peers;
    bool is_free;
  };
  const std::vector<Case> cases = {
      {{"sh", "-c", look}, "", false},
      {{"sh", "-c", look}, "1", true},
      {{folder / "python3.11", "-c", look}, "", true},
      {{folder / "python3.11", "-c", look}, "0", false},
      {{folder / "pythonic", "-c", look}, "", false},
      {{"env", "A=1", folder / "python3.11", "-c", look}, "", true},
      {{script("direct", "#!" + (folder / "python3.11"))}, "", true},
      {{script("by-env", "#!/usr/bin/env -S " + (folder / "python3.11"))}, "", true},
      {{script("plain", "#!/bin/sh")}, "", false},
  };
  for (const auto& [command, peers, is_free] : cases) {
    std::vector<std::string> args = {"run"};
    args.insert(args.end(), command.begin(), command.end());
    Job job(args, {.environment = {{"LOCKSTEP_PYTHON_PEERS", peers}}});
    ASSERT_TRUE(job.await("port=")) << command.front();
    ASSERT_TRUE(job.await("\n"));
    const int port = std::atoi(job.out().substr(job.out().find('=') + 1).c_str());
    EXPECT_EQ(connects(INADDR_LOOPBACK, port), !is_free) << command.front() << " " << peers;
    EXPECT_EQ(job.out().starts_with("none"), is_free) << command.front() << " " << peers;
  }
}

TEST(Environment, ThePortIsLeftFreeForPythonOnSeveralHostsToo) {
  const test::Folder folder(test::Folder::On::Disk);
  const std::string python = folder / "python3";
  std::filesystem::create_symlink("/bin/sh", python);
  const TwoHosts hosts;
  const std::vector<std::string> program = {python, "-c", "echo store=${LOCKSTEP_STORE_FD:-none}"};
  Job first(hosts.args(0, program), TwoHosts::with_token());
  Job second(hosts.args(1, program), TwoHosts::with_token());
  EXPECT_EQ(second.wait().exit_code, 0);
  const Result result = first.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[rank 0] store=none\n"));
}

TEST(Environment, AProgramThatFindsItsPortTakenIsToldWhy) {
  const std::string fails =
      "[ $RANK = 1 ] || { echo The server socket has failed to listen on any address >&2; exit 1; "
      "}";
  EXPECT_THAT(run_script(2, fails).err, HasSubstr("needs LOCKSTEP_PYTHON_PEERS=1"));
  EXPECT_THAT(run_script(2, fails, {.environment = {{"LOCKSTEP_PYTHON_PEERS", "1"}}}).err,
              Not(HasSubstr("needs LOCKSTEP_PYTHON_PEERS")));
}

TEST(Environment, NoOtherDescriptorIsInherited) {
  // No pipe in the script: the shell itself would have it open while ls looks.
  const Result result =
      run_script(2,
                 "for fd in 0 1 2 $LOCKSTEP_STORE_FD $LOCKSTEP_CONTROL_FD $LOCKSTEP_FLIGHT_FD; do "
                 "echo expected $fd; done; ls /proc/$$/fd",
                 {.extra_fd = 200});
  EXPECT_EQ(result.exit_code, 0);
  std::multiset<std::string> expected, open;
  for (const std::string& line : lines_of(result.out)) {
    const size_t word = line.find("expected ");
    if (word == std::string::npos) {
      open.insert(line);
    } else {
      expected.insert(line.substr(0, word) + line.substr(word + 9));
    }
  }
  EXPECT_EQ(expected.size(), 11u);  // two times three streams and two segments, and the store
  EXPECT_EQ(open, expected);
}

TEST(Environment, EveryRankInheritsTheControlSegment) {
  const Result result = run_script(2, "readlink /proc/$$/fd/$LOCKSTEP_CONTROL_FD");
  EXPECT_THAT(lines_of(result.out),
              UnorderedElementsAre(StartsWith("[rank 0] /memfd:lockstep-control"),
                                   StartsWith("[rank 1] /memfd:lockstep-control")));
}

TEST(Environment, PrintEnvShowsWhatARankWouldSee) {
  const Result shown =
      Job({"run", "--nproc-per-node", "2", "--rdzv-id", "x", "--print-env"}).wait();
  EXPECT_EQ(shown.exit_code, 0);
  EXPECT_THAT(shown.out, HasSubstr("rank 1: RANK=1\n"));
  EXPECT_THAT(shown.out, HasSubstr("rank 0: TORCHELASTIC_RUN_ID=x\n"));
}

TEST(Environment, DryRunStartsNothing) {
  const Result shown =
      Job({"run", "--nproc-per-node", "3", "--dry-run", "--", "echo", "--epochs", "2"}).wait();
  EXPECT_EQ(shown.exit_code, 0);
  EXPECT_THAT(shown.out, StartsWith("3 ranks on this host, "));
  EXPECT_THAT(shown.out, HasSubstr("/echo --epochs 2\n"));
}

}  // namespace
}  // namespace lockstep::launch::testing
