// One event each: what the launchers of a job then do. Simulated time, as in membership_test.cpp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/simulation.inl"
#include "launch/simulation_network.inl"

namespace lockstep::launch::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Scenario calm(int hosts, int restarts = 0) {
  Scenario scenario;
  scenario.hosts = hosts;
  scenario.job_spec = {hosts, hosts, restarts};
  scenario.chaos_until = ms(1);
  return scenario;
}

// The first rank and the status of each host, over all attempts.
std::string ranks_of(const Simulation& simulation, uint32_t attempt) {
  std::string text;
  for (const auto& [host, launch] : simulation.launches.at(attempt)) {
    text += fmt::format("{}:{} ", host, launch.first_rank);
  }
  return text;
}

void expect_all_end(Simulation& simulation, int hosts, int status, const std::string& why) {
  EXPECT_THAT(simulation.run(ms(1'000'000)), IsEmpty());
  EXPECT_EQ(simulation.ends.size(), static_cast<size_t>(hosts));
  for (const auto& [host, end] : simulation.ends) {
    EXPECT_EQ(end.status, status) << host;
    EXPECT_THAT(end.why, HasSubstr(why)) << host;
  }
}

TEST(MembershipScript, AJobRunsOnceAndEndsWithSuccess) {
  Simulation simulation(calm(4), 1);
  expect_all_end(simulation, 4, 0, "");
  EXPECT_EQ(simulation.attempts, 1U);
  EXPECT_EQ(ranks_of(simulation, 1), "0:0 1:1 2:3 3:6 ");  // 1, 2, 3, 1 ranks
  EXPECT_EQ(simulation.launches[1][2].world_size, 7);
  EXPECT_EQ(simulation.launches[1][2].nodes, 4);
  EXPECT_EQ(simulation.launches[1][2].master_port, 1000);
}

TEST(MembershipScript, AFailureEndsTheJobEverywhereWithItsStatus) {
  Simulation simulation(calm(4), 2);
  simulation.at(ms(10'000), [&] { simulation.fail_rank(2, Failure::Kind::Killed); });
  expect_all_end(simulation, 4, 137, "a rank on host2 failed");
  EXPECT_LT(simulation.now, ms(10'000) + Timing().stop + ms(500));
}

TEST(MembershipScript, AKilledRankIsTheCauseBeforeAnExitThatEchoesIt) {
  Simulation simulation(calm(4), 3);
  simulation.at(ms(10'000), [&] { simulation.fail_rank(1, Failure::Kind::Exited); });
  simulation.at(ms(10'005), [&] { simulation.fail_rank(3, Failure::Kind::Killed); });
  expect_all_end(simulation, 4, 137, "a rank on host3 failed");
}

TEST(MembershipScript, ARestartKeepsEveryRankWhereItWas) {
  Simulation simulation(calm(4, 1), 4);
  simulation.at(ms(10'000), [&] { simulation.fail_rank(2, Failure::Kind::Exited); });
  expect_all_end(simulation, 4, 0, "");
  EXPECT_EQ(ranks_of(simulation, 2), ranks_of(simulation, 1));
  EXPECT_THAT(simulation.said, Contains("host3: a rank on host2 failed; restart 1 of 1, now"));
}

TEST(MembershipScript, ASignalAfterAFailureEndsTheJobWhicheverHostGetsIt) {
  for (const int host : {0, 1, 2}) {
    Simulation simulation(calm(3, 5), 4);
    simulation.at(ms(10'000), [&] { simulation.fail_rank(2, Failure::Kind::Exited); });
    simulation.at(ms(10'050), [&] { simulation.interrupt(host); });
    expect_all_end(simulation, 3, 143, fmt::format("host{} got SIGTERM", host));
    EXPECT_EQ(simulation.attempts, 1U);
  }
}

TEST(MembershipScript, ASecondSignalKillsTheRanksOfAllHosts) {
  for (const int host : {0, 1, 2}) {
    for (uint64_t seed = 0; seed < 10; ++seed) {
      Scenario scenario = calm(3);
      scenario.timing.stop_after_signal = ms(64'000);
      Simulation simulation(scenario, seed);
      simulation.at(ms(10'000), [&] { simulation.interrupt(host); });
      simulation.at(ms(10'200), [&] { simulation.interrupt_again(host); });
      expect_all_end(simulation, 3, 143, fmt::format("host{} got SIGTERM", host));
      EXPECT_LT(simulation.now, ms(10'200) + scenario.timing.stop_at_once + ms(200));
    }
  }
}

TEST(MembershipScript, ASignalWhileTheJobWaitsForALostHostEndsIt) {
  for (const int host : {0, 1}) {
    Simulation simulation(calm(3, 5), 4);
    simulation.at(ms(10'000), [&] { simulation.power_off(2); });
    simulation.at(ms(60'000), [&] { simulation.interrupt(host); });
    expect_all_end(simulation, 2, 143, fmt::format("host{} got SIGTERM", host));
    EXPECT_LT(simulation.now, ms(80'000));
  }
}

TEST(MembershipScript, RestartsRunOut) {
  Simulation simulation(calm(2, 1), 5);
  for (const int at : {10'000, 25'000}) {
    simulation.at(ms(at), [&] { simulation.fail_rank(1, Failure::Kind::Exited); });
  }
  expect_all_end(simulation, 2, 3, "no restart is left of 1");
}

TEST(MembershipScript, ACrashLoopEndsEarlyAndSlowsDown) {
  Scenario scenario = calm(2, 100);
  scenario.delay = ms(1);
  Simulation simulation(scenario, 6);
  for (int at = 3'000; at < 200'000; at += 10) {
    simulation.at(ms(at), [&] { simulation.fail_rank(1, Failure::Kind::Exited); });
  }
  expect_all_end(simulation, 2, 3, "not restarted: rank 1 failed in the same way 3 times in a row");
  EXPECT_EQ(simulation.attempts, 3U);
}

TEST(MembershipScript, AHostThatComesBackGetsItsRanksAgain) {
  Simulation simulation(calm(4, 1), 7);
  simulation.at(ms(10'000), [&] { simulation.power_off(1); });
  simulation.at(ms(30'000), [&] { simulation.boot(1); });
  expect_all_end(simulation, 4, 0, "");
  EXPECT_EQ(ranks_of(simulation, 2), ranks_of(simulation, 1));
  EXPECT_THAT(simulation.said,
              Contains(AllOf(HasSubstr("host3: host1"), HasSubstr("no sign of life for 5 s"))));
}

TEST(MembershipScript, FewerHostsGoOnWithoutOneThatIsLost) {
  Scenario scenario = calm(4, 1);
  scenario.job_spec.min_nodes = 2;
  Simulation simulation(scenario, 8);
  simulation.at(ms(10'000), [&] { simulation.crash(1); });
  expect_all_end(simulation, 3, 0, "");
  EXPECT_EQ(ranks_of(simulation, 2), "0:0 2:1 3:4 ");
  EXPECT_EQ(simulation.launches[2][3].world_size, 5);
}

TEST(MembershipScript, WithoutRestartsALostHostEndsTheJob) {
  Simulation simulation(calm(4), 9);
  simulation.at(ms(10'000), [&] { simulation.crash(1); });
  expect_all_end(simulation, 3, 1, "host1 (1) was lost");
  EXPECT_LT(simulation.now, ms(10'000) + Timing().stop + ms(500));
}

TEST(MembershipScript, AHostThatIsCutOffEndsToo) {
  Simulation simulation(calm(3), 10);
  simulation.at(ms(10'000), [&] { simulation.cut({2}, ms(1'000'000)); });
  EXPECT_THAT(simulation.run(ms(1'000'000)), IsEmpty());
  EXPECT_THAT(simulation.ends[0].why, HasSubstr("host2 (2) was lost: no sign of life for 5 s"));
  EXPECT_THAT(simulation.ends[2].why,
              HasSubstr("lost the connection to the coordinator at 0:1: no answer for 5 s"));
  EXPECT_LT(simulation.ends[2].at, ms(10'000) + Timing().lease + Timing().stop + ms(100));
}

TEST(MembershipScript, AHostWhoseRanksTakeLongToStopComesBackAllTheSame) {
  Scenario scenario = calm(2, 1);
  scenario.timing.stop = ms(100'000);  // as with --grace=96
  scenario.timing.rejoin = ms(1'000);
  for (uint64_t seed = 0; seed < 10; ++seed) {
    Simulation simulation(scenario, seed);
    simulation.at(ms(10'000), [&] { simulation.cut({1}, ms(20'000)); });
    expect_all_end(simulation, 2, 0, "");
    EXPECT_EQ(simulation.attempts, 2U);
  }
}

TEST(MembershipScript, ANewHostJoinsAndTheOthersKeepTheirRanks) {
  Scenario scenario = calm(1);
  scenario.job_spec = {1, 2, 0};
  scenario.newcomers = 1;
  scenario.timing.last_call = ms(0);
  Simulation simulation(scenario, 11);
  expect_all_end(simulation, 2, 0, "");
  EXPECT_EQ(simulation.attempts, 2U);
  EXPECT_EQ(ranks_of(simulation, 1), "0:0 ");
  EXPECT_EQ(ranks_of(simulation, 2), "0:0 1:1 ");
  EXPECT_THAT(simulation.said, Contains("host0: host1 joins"));
}

// Its ranks may have been stopped for another host to join, after which the job goes on.
TEST(MembershipScript, AHostThatIsCutOffWhileItsRanksAreStoppedComesBackWhereOthersMayJoin) {
  for (const int least : {1, 2}) {
    NodeOptions options;
    options.self.job_spec = {least, 2, 0};
    Node node(options, ms(0));
    node.connected(1, ms(1));
    Start start{.attempt = 1};
    start.hosts = {{2, 1}};
    for (const Message& message : {Message(Welcome{.id = 2, .coordinator = 7}), Message(start),
                                   Message(Stop{1, 0, "host1 joins"})}) {
      node.receive(1, std::make_shared<const Message>(message), ms(2));
    }
    node.ranks_over(std::nullopt, 1, ms(3));
    static_cast<void>(node.take_actions());
    node.closed(1, false, ms(4));
    node.tick(ms(500));
    const auto actions = node.take_actions();
    const auto is_dial = [](const Action& one) { return std::holds_alternative<Dial>(one); };
    EXPECT_EQ(std::ranges::any_of(actions, is_dial), least < 2);
    EXPECT_EQ(node.is_over(), least == 2);
  }
}

// Its connection was dropped as one without an answer, before it was opened.
TEST(MembershipScript, ANameThatTakesLongToLookUpTakesNoTimeOffItsConnection) {
  NodeOptions options;
  Node node(options, ms(0));
  const Time late = options.timing.lease + ms(1000);
  node.resolved(1, late);
  node.tick(late + ms(1));
  EXPECT_GT(node.deadline(late + ms(1)), late + ms(1));
  node.connected(1, late + ms(2));
  const auto actions = node.take_actions();
  const auto is_join = [](const Action& one) {
    const auto* send = std::get_if<Send>(&one);
    return send != nullptr && std::holds_alternative<Join>(*send->message);
  };
  EXPECT_TRUE(std::ranges::any_of(actions, is_join));
}

TEST(MembershipScript, TheLastCallWaitsForMoreHosts) {
  Scenario scenario = calm(3);
  scenario.job_spec.min_nodes = 1;
  scenario.timing.last_call = ms(5'000);  // they come within 2 s
  Simulation simulation(scenario, 12);
  expect_all_end(simulation, 3, 0, "");
  EXPECT_EQ(simulation.attempts, 1U);
  EXPECT_EQ(simulation.launches[1].size(), 3U);
}

TEST(MembershipScript, AMissingHostIsAnErrorThatSaysWhoIsHere) {
  Scenario scenario = calm(2);
  scenario.job_spec = {3, 3, 0};
  scenario.timing.join = ms(8'000);
  Simulation simulation(scenario, 13);
  expect_all_end(simulation, 2, 1, "2 of 3 hosts came within 8 s (here: host0, host1)");
}

TEST(MembershipScript, TheCoordinatorsEndIsTheJobs) {
  for (const int restarts : {0, 3}) {
    Simulation simulation(calm(4, restarts), 14);
    simulation.at(ms(10'000), [&] { simulation.crash(0); });
    expect_all_end(simulation, 3, 1, "lost the connection to the coordinator at 0:1");
    EXPECT_LT(simulation.now, ms(10'000) + Timing().stop + ms(2'000));
  }
}

TEST(MembershipScript, ASignalToOneLauncherEndsAllAsThatSignalWould) {
  Simulation simulation(calm(3, 5), 15);
  simulation.at(ms(10'000), [&] { simulation.interrupt(1); });
  expect_all_end(simulation, 3, 143, "host1 got SIGTERM");
  EXPECT_EQ(simulation.attempts, 1U);
}

Join joining(int node_rank, JobSpec job_spec) {
  return {.launcher = static_cast<uint64_t>(node_rank) + 100,
          .host = fmt::format("h{}", node_rank),
          .node_rank = node_rank,
          .address = "10.0.0.9",
          .job_spec = job_spec};
}

TEST(CoordinatorPlace, RefusesOtherTermsAndWaitsForATakenNodeRank) {
  const Timing timing;
  Coordinator coordinator({2, 2, 0}, timing, "", ms(0));
  ASSERT_TRUE(std::holds_alternative<Welcome>(coordinator.place(joining(0, {2, 2, 0}), ms(0))));
  const Message job_spec = coordinator.place(joining(1, {2, 2, 3}), ms(1));
  EXPECT_EQ(std::get<Refuse>(job_spec).reason,
            "h1 was started with --max-restarts 3, the job has --max-restarts 0: start all hosts "
            "with the same options");
  EXPECT_THAT(std::get<Refuse>(coordinator.place(joining(2, {2, 2, 0}), ms(1))).reason,
              HasSubstr("--node-rank 2"));
  Join twin = joining(0, {2, 2, 0});
  twin.launcher = 7;
  EXPECT_EQ(std::get<Wait>(coordinator.place(twin, ms(2))).reason,
            "node rank 0 is h0's (10.0.0.9)");
}

TEST(CoordinatorPlace, NodeRanksDecideTheOrder) {
  RankAssignment seating;
  EXPECT_EQ(seating.seat({{1, 1, "c", 2}, {2, 2, "b", 0}, {3, 3, "a", 1}}, 3),
            (std::vector<NodeId>{2, 3, 1}));
}

TEST(CoordinatorPlace, OtherwiseTheCoordinatorIsFirstAndNamesAreCounted) {
  RankAssignment seating;
  EXPECT_EQ(seating.seat({{1, 1, "z"}, {2, 2, "n10"}, {3, 3, "n9"}, {4, 4, "n09"}}, 3),
            (std::vector<NodeId>{1, 4, 3}));
  // n09 is lost; n10 takes its place and n9 stays where it is.
  EXPECT_EQ(seating.seat({{1, 1, "z"}, {2, 2, "n10"}, {3, 3, "n9"}}, 3),
            (std::vector<NodeId>{1, 2, 3}));
  EXPECT_TRUE(comes_before("n9", "n10"));
  EXPECT_FALSE(comes_before("n10", "n9"));
  EXPECT_FALSE(comes_before("n7", "n7"));
  EXPECT_TRUE(comes_before("a7", "a7b"));
}

}  // namespace
}  // namespace lockstep::launch::testing
