// Who is missing: ranks at work long after others have ended, hosts of which that is so, ranks that
// are stopped on another host, and a program that the disk does not give.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>

#include "core/files/fd.h"
#include "launch/job.h"
#include "launch/rendezvous/coordinator/coordinator.h"
#include "launch/simulation.inl"
#include "launch/simulation_network.inl"
#include "support/folder.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
namespace fs = std::filesystem;

class Late : public ::testing::Test {
 protected:
  const test::Folder folder_{test::Folder::On::Disk};
};

TEST_F(Late, ARankAtWorkLongAfterAnotherHasEndedIsNamed) {
  // Without children: a shell that starts one is in an uninterruptible wait for a moment.
  const std::string go = folder_ / "go";
  ASSERT_EQ(mkfifo(go.c_str(), 0600), 0);
  const std::string script = "test $RANK = 0 && exit 0; read line < $FOLDER/go; true";
  Job job(script_args(2, script),
          {.environment = {{"FOLDER", folder_.path()}, {"LOCKSTEP_LATE_RANKS", "1"}}});
  ASSERT_TRUE(job.await_error(
      "1 of 2 ranks of this host have exited with status 0; still running after 1 s: rank 1 (in no "
      "collective)"));
  std::ofstream{go};
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(lines_of(result.err).size(), 1U) << result.err;  // once
}

TEST_F(Late, ARankWhoseMainThreadAloneHasEndedIsNamed) {
  const std::string self = fs::read_symlink("/proc/self/exe");
  Job job(script_args(2, "test $RANK = 1 && exit 0; exec \"$SELF\" rank headless"),
          {.environment = {{"SELF", self}, {"LOCKSTEP_LATE_RANKS", "1"}}});
  ASSERT_TRUE(job.await_error(
      "1 of 2 ranks of this host have exited with status 0; still running after 1 s: rank 0 (in no "
      "collective so far (its main thread has ended, other threads run)), pid "));
  const pid_t launcher = job.pid();
  const Result result = job.wait();  // its stdin ends
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, ContainsRegex("pid [0-9]+, its threads: [^ ]+ in [^,]+, [^ ]+ in "));
  EXPECT_THAT(result.err, HasSubstr(fmt::format("(kill -USR2 {} shows their stacks)", launcher)));
}

TEST_F(Late, AWrongTimeIsRefused) {
  const Result result = run_script(1, "true", {.environment = {{"LOCKSTEP_LATE_RANKS", "soon"}}});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("LOCKSTEP_LATE_RANKS"));
}

TEST(LateHosts, AreNamedByTheCoordinatorOnce) {
  const JobSpec job_spec{2, 2, 0};
  Coordinator coordinator(job_spec, {.survivors = ms(0)}, "", ms(0));
  for (int number = 0; number < 2; ++number) {
    coordinator.place({.launcher = static_cast<uint64_t>(number) + 1,
                       .host = fmt::format("h{}", number),
                       .address = "10.0.0.1:1",
                       .job_spec = job_spec},
                      ms(0));
    coordinator.receive(static_cast<NodeId>(number + 1), Ready{}, ms(1));
  }
  ASSERT_EQ(coordinator.phase(), Coordinator::Phase::Running);
  EXPECT_EQ(coordinator.deadline(ms(2)), std::nullopt);
  coordinator.receive(1, Done{.attempt = 1}, ms(1'000));
  EXPECT_EQ(coordinator.deadline(ms(1'000)), ms(31'000));
  coordinator.tick(ms(30'999));
  EXPECT_THAT(coordinator.take_remarks(), IsEmpty());
  coordinator.tick(ms(31'000));
  EXPECT_THAT(
      coordinator.take_remarks(),
      ElementsAre(
          "all ranks of 1 of 2 hosts have exited with status 0; still running after 30 s: h1"));
  EXPECT_EQ(coordinator.deadline(ms(31'000)), std::nullopt);
  coordinator.receive(2, Done{.attempt = 1}, ms(90'000));
  EXPECT_EQ(coordinator.phase(), Coordinator::Phase::Ended);
}

TEST(DoneHosts, AreNamedWhenARankElsewhereFails) {
  const JobSpec job_spec{2, 2, 0};
  Coordinator coordinator(job_spec, {.survivors = ms(0)}, "", ms(0));
  for (int number = 0; number < 2; ++number) {
    coordinator.place({.launcher = static_cast<uint64_t>(number) + 1,
                       .host = fmt::format("h{}", number),
                       .job_spec = job_spec},
                      ms(0));
    coordinator.receive(static_cast<NodeId>(number + 1), Ready{}, ms(1));
  }
  coordinator.receive(2, Done{.attempt = 1}, ms(1'000));
  const Failure failure{.rank = 0, .status = 1, .what = "rank 0 on h0 exited with status 1"};
  coordinator.receive(1, Failed{1, failure}, ms(1'100));
  coordinator.receive(1, Ready{1, 0, failure}, ms(1'200));
  coordinator.receive(2, Ready{1, 0}, ms(1'200));
  const auto broadcasts = coordinator.take_broadcasts();
  const std::string why =
      "rank 0 on h0 exited with status 1; the ranks on h1 had all exited with status 0 before";
  EXPECT_EQ(std::get<Stop>(broadcasts.at(1)).why, why);
  EXPECT_EQ(std::get<End>(broadcasts.at(2)).why, why);
}

TEST_F(Late, ARankThatIsStoppedIsNamedOnEveryHost) {
  const TwoHosts hosts;
  const std::vector<std::string> rank = {"sh", "-c", "echo pid $RANK $$; exec sleep 1000"};
  const auto with = [&](int host) {
    std::vector<std::string> flags = {"--grace=1"};
    flags.insert(flags.end(), rank.begin(), rank.end());
    return hosts.args(host, flags);
  };
  Job first(with(0), TwoHosts::with_token());
  Job second(with(1), TwoHosts::with_token());
  ASSERT_TRUE(first.await("pid 0"));
  ASSERT_TRUE(second.await("pid 3 "));
  ASSERT_TRUE(second.await("\n", 2));
  const std::string out = second.out(), label = "pid 3 ";
  const int pid = std::stoi(out.substr(out.find(label) + label.size()));
  kill(pid, SIGSTOP);
  EXPECT_TRUE(second.await_error(fmt::format("rank 3 is stopped (state T, pid {}", pid)));
  EXPECT_TRUE(first.await_error(fmt::format("is stopped (state T, pid {})", pid)));
  EXPECT_THAT(first.err(), HasSubstr("rank 3 on "));
  kill(first.pid(), SIGTERM);
  EXPECT_EQ(first.wait().exit_code, 128 + SIGTERM);
  EXPECT_EQ(second.wait().exit_code, 128 + SIGTERM);
  EXPECT_THAT(second.err(), Not(HasSubstr("rank 3 on ")));
}

// The kernel asks whoever holds a lease on a file to give it back, and lets others wait for it.
TEST_F(Late, AProgramThatTheDiskDoesNotGiveKeepsNoLauncherFromItsWork) {
  std::string program[2];
  for (int host = 0; host < 2; ++host) {
    fs::create_directory(folder_ / std::to_string(host));
    program[host] = fmt::format("{}/{}/program", folder_.path(), host);
    std::ofstream(program[host]) << "#!/bin/sh\necho here\nexec sleep 1000\n";
    chmod(program[host].c_str(), 0755);
  }
  const TwoHosts hosts;
  Job second(hosts.args(1, {"-v", "--grace=1", program[1]}), TwoHosts::with_token());
  ASSERT_TRUE(second.await_error("connecting to the launcher at"));
  std::signal(SIGIO, SIG_IGN);
  const Fd held(open(program[1].c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(fcntl(held.get(), F_SETLEASE, F_WRLCK), 0);
  Job first(hosts.args(0, {"--grace=1", program[0]}), TwoHosts::with_token());
  ASSERT_TRUE(first.await("here", 2));
  ASSERT_TRUE(second.await_error("started rank 3 as process"));
  kill(first.pid(), SIGTERM);
  const auto asked = std::chrono::steady_clock::now();
  EXPECT_EQ(second.wait().exit_code, 128 + SIGTERM) << second.err();
  EXPECT_EQ(first.wait().exit_code, 128 + SIGTERM) << first.err();
  // The lease is broken after 45 s (/proc/sys/fs/lease-break-time).
  EXPECT_LT(std::chrono::steady_clock::now() - asked, std::chrono::seconds(30));
  EXPECT_EQ(second.out(), "");
  std::signal(SIGIO, SIG_DFL);
}

TEST(Variables, AWrongOneIsNamedBesideItsFlag) {
  const auto error = [](const char* name, const char* value, std::vector<std::string> flags = {}) {
    std::vector<std::string> args = {"run"};
    args.insert(args.end(), flags.begin(), flags.end());
    args.emplace_back("true");
    const Result result = Job(args, {.environment = {{name, value}}}).wait();
    EXPECT_EQ(result.exit_code, 2);
    return result.err;
  };
  EXPECT_THAT(error("PET_NPROC_PER_NODE", "x"),
              AllOf(HasSubstr("--nproc-per-node 'x'"), HasSubstr("(from PET_NPROC_PER_NODE)")));
  EXPECT_THAT(error("PET_MAX_RESTARTS", "-1"), HasSubstr("(from PET_MAX_RESTARTS)"));
  EXPECT_THAT(error("PET_RDZV_CONF", "a"), HasSubstr("(from PET_RDZV_CONF)"));
  // The flag is wrong, and the variable has no part in it.
  EXPECT_THAT(error("PET_MAX_RESTARTS", "1", {"--max_restarts=x"}), Not(HasSubstr("from PET_")));
}

}  // namespace
}  // namespace lockstep::launch::testing
