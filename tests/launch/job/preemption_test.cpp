// SIGUSR1 to the launcher, a scheduler's notice of preemption: no rank is started again after it.
#include "lockstep/core/preemption.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>

#include "launch/job.h"
#include "launch/rendezvous/coordinator/coordinator.h"
#include "launch/simulation.inl"
#include "launch/simulation_network.inl"
#include "support/folder.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::vector<std::string> job(const std::string& restarts, const std::string& script) {
  return {"run", "--nproc-per-node=2", "--max-restarts=" + restarts, "sh", "-c", script};
}

// Failures in turn of two ways, which are no crash loop, until the pause is long.
const std::string kFailing = "exit $((1 + TORCHELASTIC_RESTART_COUNT % 2))";

TEST(PreemptedJob, EndsInThePauseBeforeARestart) {
  Job failing(job("50", kFailing));
  ASSERT_TRUE(failing.await_error("restart 6 of 50, in 4 s"));
  kill(failing.pid(), SIGUSR1);
  const Result result = failing.wait();
  EXPECT_EQ(result.exit_code, kRequeueStatus);
  EXPECT_THAT(result.err, HasSubstr("stopped by SIGUSR1"));
  EXPECT_THAT(result.err, Not(HasSubstr("restart 7")));
}

TEST(PreemptedJob, UsesNoRestartForRanksThatHaveNoHandlerYet) {
  for (const std::string restarts : {"3", "0"}) {
    Job starting(job(restarts, "echo ready; exec sleep 1000"));
    ASSERT_TRUE(starting.await("ready", 2));
    kill(starting.pid(), SIGUSR1);
    const Result result = starting.wait();
    EXPECT_EQ(result.exit_code, restarts == "0" ? 128 + SIGUSR1 : kRequeueStatus);
    EXPECT_THAT(result.err, ::testing::ContainsRegex("rank [01] was killed by SIGUSR1, which was "
                                                     "forwarded before it had a handler"));
    EXPECT_EQ(lines_of(result.out).size(), 2U) << result.out;
  }
}

TEST(PreemptedJob, IsNoneWhereAProgramUsesTheSignalForSomethingElseAndFailsLater) {
  Job failing(job("1",
                  "test $TORCHELASTIC_RESTART_COUNT = 1 && exit 0; trap 'told=1' USR1; echo ready; "
                  "until test \"$told\"; do sleep 0.01; done; exit 3"));
  ASSERT_TRUE(failing.await("ready", 2));
  kill(failing.pid(), SIGUSR1);
  const Result result = failing.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("restart 1 of 1, now"));
}

TEST(PreemptedJob, EndsOnAllHostsInThePauseBeforeARestart) {
  for (const int told : {0, 1}) {
    const TwoHosts hosts;
    const std::vector<std::string> failing = {"--max-restarts=50", "sh", "-c", kFailing};
    Job first(hosts.args(0, failing), TwoHosts::with_token());
    Job second(hosts.args(1, failing), TwoHosts::with_token());
    Job& one = told == 0 ? first : second;
    const std::string before = "restart 5 of 50, in 2 s";
    ASSERT_TRUE(one.await_error(before));  // that pause is over
    ASSERT_TRUE(one.await_error("failed first", one.err().find(before)));
    kill(one.pid(), SIGUSR1);
    EXPECT_EQ(first.wait().exit_code, kRequeueStatus) << first.err();
    EXPECT_EQ(second.wait().exit_code, kRequeueStatus) << second.err();
    EXPECT_THAT(first.err(), HasSubstr("got SIGUSR1"));
    EXPECT_THAT(second.err(), HasSubstr("got SIGUSR1"));
  }
}

TEST(PreemptedJob, UsesNoRestartForRanksOfOneHostThatHaveNoHandlerYet) {
  const TwoHosts hosts;
  const std::vector<std::string> starting = {"--max-restarts=3", "sh", "-c",
                                             "echo ready; exec sleep 1000"};
  Job first(hosts.args(0, starting), TwoHosts::with_token());
  Job second(hosts.args(1, starting), TwoHosts::with_token());
  ASSERT_TRUE(first.await("ready", 2));
  ASSERT_TRUE(second.await("ready", 2));
  kill(second.pid(), SIGUSR1);
  EXPECT_EQ(first.wait().exit_code, kRequeueStatus) << first.err();
  EXPECT_EQ(second.wait().exit_code, kRequeueStatus) << second.err();
  EXPECT_THAT(first.err(), Not(HasSubstr("restart")));
}

// The first host may run alone; the second one comes later.
class JoinedJob : public ::testing::Test {
 protected:
  std::vector<std::string> args(int host, const std::string& script) const {
    auto args = hosts_.args(host, {"--grace=60", "sh", "-c", script});
    args[1] = "--nnodes=1:2";
    args[4] += ",last_call_timeout=0";
    return args;
  }
  Settings settings() const {
    return TwoHosts::with_token({.environment = {{"FOLDER", folder_.path()}}});
  }
  void go() const { std::ofstream{folder_ / "go"}; }

  const TwoHosts hosts_;
  const test::Folder folder_{test::Folder::On::Disk};
  // It saves for as long as there is no file `go`.
  const std::string saving_ =
      "trap 'echo told' USR1; trap 'echo stopping' TERM; echo ready; "
      "until test -e $FOLDER/go; do sleep 0.01; done; exit 75";
};

TEST_F(JoinedJob, TakesNoHostOnceItsRanksHaveBeenToldOfAPreemption) {
  Job first(args(0, saving_), settings());
  ASSERT_TRUE(first.await("ready", 2));
  kill(first.pid(), SIGUSR1);
  ASSERT_TRUE(first.await("told", 2));
  Job second(args(1, saving_), settings());
  ASSERT_TRUE(first.await_error("has to wait: the ranks have been told of a preemption"));
  ASSERT_TRUE(second.await_error("no host joins them"));
  go();
  const Result result = first.wait();
  EXPECT_EQ(result.exit_code, kRequeueStatus) << result.err;
  EXPECT_THAT(result.out, Not(HasSubstr("stopping")));
  EXPECT_EQ(second.wait().out, "");
}

TEST_F(JoinedJob, IsNotStartedAgainWhenTheNoticeComesWhileItsRanksAreStoppedForAHost) {
  Job first(args(0, saving_), settings());
  ASSERT_TRUE(first.await("ready", 2));
  Job second(args(1, saving_), settings());
  ASSERT_TRUE(first.await("stopping", 2));
  kill(first.pid(), SIGUSR1);
  ASSERT_TRUE(first.await_error("SIGUSR1: no rank is started again"));
  go();
  EXPECT_EQ(first.wait().exit_code, kRequeueStatus) << first.err();
  EXPECT_EQ(second.wait().exit_code, kRequeueStatus) << second.err();
  EXPECT_EQ(second.out(), "");
}

// Three hosts of which the last one crashes and comes back.
Scenario joined_again() {
  Scenario scenario;
  scenario.hosts = 3;
  scenario.job_spec = {2, 3, 5};
  scenario.chaos_until = ms(1);
  scenario.timing.last_call = ms(5'000);
  return scenario;
}

TEST(MembershipScript, NoHostJoinsRanksThatHaveBeenToldOfAPreemption) {
  for (const int told : {0, 1}) {
    Simulation simulation(joined_again(), 4);
    simulation.at(ms(5'000), [&] { simulation.crash(2); });
    simulation.at(ms(25'000), [&] { simulation.notify(told); });
    simulation.at(ms(26'000), [&] { simulation.boot(2); });
    EXPECT_THAT(simulation.run(ms(1'000'000)), IsEmpty());
    EXPECT_EQ(simulation.attempts, 2U);
    EXPECT_THAT(simulation.said, Contains(HasSubstr("host2: the ranks of the job have been told")));
    EXPECT_EQ(simulation.ends.size(), 3U);
    for (const auto& [host, end] : simulation.ends) EXPECT_EQ(end.status, 0) << host;
  }
}

TEST(MembershipScript, ANoticeOfPreemptionWhileRanksAreStoppedEndsTheJob) {
  for (const int told : {0, 1}) {
    for (uint64_t seed = 0; seed < 10; ++seed) {
      Scenario scenario = joined_again();
      scenario.timing.stop = ms(60'000);
      Simulation simulation(scenario, seed);
      simulation.at(ms(5'000), [&] { simulation.fail_rank(2, Failure::Kind::Killed); });
      simulation.at(ms(5'500), [&] { simulation.notify(told); });
      EXPECT_THAT(simulation.run(ms(1'000'000)), IsEmpty());
      EXPECT_EQ(simulation.attempts, 1U);
      for (const auto& [host, end] : simulation.ends) {
        EXPECT_EQ(end.status, kRequeueStatus) << host;
        EXPECT_THAT(end.why, HasSubstr(fmt::format("host{} got SIGUSR1", told)));
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::launch::testing
