// What a launcher says while it waits, whom it refuses or keeps as a spare, and what --verbose
// adds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "core/network/address.h"
#include "launch/job.h"
#include "launch/rendezvous/coordinator/coordinator.h"
#include "launch/simulation.inl"
#include "launch/simulation_network.inl"

namespace lockstep::launch::testing {
namespace {

using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const JobSpec kThree{3, 3, 1};

Join host(int number, const JobSpec& job_spec = kThree) {
  return {.launcher = static_cast<uint64_t>(number) + 100,
          .host = fmt::format("h{}", number),
          .node_rank = number < job_spec.max_nodes ? number : -1,
          .address = fmt::format("10.0.0.{}", number),
          .job_spec = job_spec};
}

TEST(WaitingCoordinator, SaysWhereHowManyHaveComeAndWhoIsMissing) {
  Coordinator coordinator(kThree, {}, "10.0.0.0:29400", ms(0));
  coordinator.place(host(0), ms(0));
  coordinator.receive(1, Ready{}, ms(1));
  coordinator.tick(ms(1'000));
  EXPECT_THAT(coordinator.take_remarks(), IsEmpty());
  ASSERT_LE(*coordinator.deadline(ms(1'000)), ms(2'000));
  coordinator.tick(ms(2'000));
  EXPECT_THAT(
      coordinator.take_remarks(),
      ElementsAre("waiting at 10.0.0.0:29400: 1 of 3 hosts have come (here: h0; missing: node "
                  "rank 1, 2); for 600 s in all (--rdzv-conf join_timeout)"));
  coordinator.tick(ms(20'000));
  EXPECT_THAT(coordinator.take_remarks(), IsEmpty());  // nothing has changed
  coordinator.place(host(2), ms(21'000));
  coordinator.receive(2, Ready{}, ms(21'000));
  coordinator.tick(ms(40'000));
  EXPECT_THAT(coordinator.take_remarks(), ElementsAre(HasSubstr("2 of 3 hosts have come (here: h0, "
                                                                "h2; missing: node rank 1)")));
}

TEST(WaitingCoordinator, NamesWhomItRefusedLastWhenTooFewHaveCome) {
  const auto end_after = [](const std::function<void(Coordinator&)>& refuse) {
    Coordinator coordinator(kThree, {}, "", ms(0));
    coordinator.place(host(0), ms(0));
    coordinator.receive(1, Ready{}, ms(1));
    refuse(coordinator);
    coordinator.tick(ms(600'001));
    const auto broadcasts = coordinator.take_broadcasts();
    return std::get<End>(broadcasts.back()).why;
  };
  EXPECT_THAT(end_after([](Coordinator&) {}), Not(HasSubstr("refused")));
  EXPECT_THAT(end_after([](Coordinator& coordinator) {
                coordinator.place(host(1, {3, 3, 7}), ms(2));
              }),
              HasSubstr("; the last one refused: h1 (10.0.0.1): h1 was started with"));
  EXPECT_THAT(end_after([](Coordinator& coordinator) {
                coordinator.note_refusal("10.0.0.2:5: it does not know this job's token");
              }),
              HasSubstr("; the last one refused: 10.0.0.2:5: it does not know"));
}

TEST(WaitingCoordinator, SaysThatItWaitsForMoreThanAreNeeded) {
  const JobSpec job_spec{1, 3, 0};
  Coordinator coordinator(job_spec, {}, "", ms(0));
  coordinator.place(host(0, job_spec), ms(0));
  coordinator.receive(1, Ready{}, ms(1));
  coordinator.tick(ms(2'000));
  EXPECT_THAT(coordinator.take_remarks(),
              ElementsAre(HasSubstr("1 hosts have come, 3 may; starting without more after 30 s")));
}

TEST(WaitingCoordinator, SaysWhomItRefusesAndWhoHasToWait) {
  Coordinator coordinator(kThree, {}, "10.0.0.0:29400", ms(0));
  coordinator.place(host(0), ms(0));
  coordinator.place(host(1, {3, 3, 9}), ms(1));
  Join twin = host(0);
  twin.launcher = 7;
  for (int time = 2; time < 5; ++time) coordinator.place(twin, ms(time));
  EXPECT_THAT(coordinator.take_remarks(),
              ElementsAre(HasSubstr("refused h1 (10.0.0.1): h1 was started with"),
                          "h0 (10.0.0.0) has to wait: node rank 0 is h0's (10.0.0.0)"));
}

TEST(WaitingCoordinator, KeepsAsManySparesAsItIsTold) {
  const JobSpec job_spec{1, 1, 1};
  Coordinator coordinator(job_spec, {.survivors = ms(0)}, "", ms(0));
  coordinator.limit_spares(1);
  for (int number = 0; number < 2; ++number) {
    Join join = host(number, job_spec);
    join.node_rank = -1;
    ASSERT_TRUE(std::holds_alternative<Welcome>(coordinator.place(join, ms(number))));
    coordinator.receive(static_cast<NodeId>(number + 1), Ready{}, ms(number));
  }
  EXPECT_THAT(coordinator.take_remarks(),
              ElementsAre("h1 (10.0.0.1) is a spare: all 1 places are taken"));
  Join third = host(2, job_spec);
  third.node_rank = -1;
  EXPECT_THAT(std::get<Refuse>(coordinator.place(third, ms(9))).reason,
              HasSubstr("all 1 places of the job are taken, and --spares 1 keeps no more"));
}

TEST(EndedCoordinator, MakesTheNextJobWaitAndRefusesItsOwnMembers) {
  const JobSpec job_spec{1, 1, 0};
  Coordinator coordinator(job_spec, {.survivors = ms(0)}, "", ms(0));
  coordinator.place(host(0, job_spec), ms(0));
  coordinator.receive(1, Ready{}, ms(0));
  coordinator.receive(1, Done{1}, ms(1));
  ASSERT_EQ(coordinator.phase(), Coordinator::Phase::Ended);
  Join join = host(0, job_spec);
  join.launcher = 7;
  EXPECT_EQ(coordinator.place(join, ms(2)),
            Message(Wait{"an earlier job at this address is ending"}));
  join.past = {.coordinator = 100, .attempt = 1};
  EXPECT_EQ(coordinator.place(join, ms(3)), Message(Refuse{"the job has ended"}));
}

// Each host starts the second job as soon as its launcher of the first one has ended.
TEST(WaitingLauncher, OfTheNextJobWaitsUntilTheLastOneHasEnded) {
  size_t waited = 0;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    Scenario scenario;
    scenario.hosts = 3;
    scenario.job_spec = {3, 3, 0};
    scenario.delay = ms(400);
    scenario.coordinator_comes_back = true;
    scenario.chaos_until = ms(100'000);
    Simulation simulation(scenario, seed);
    std::map<int, int> first;
    const std::function<void(int)> next = [&](int number) {
      const auto end = simulation.ends.find(number);
      if (end == simulation.ends.end()) {
        return simulation.at(simulation.now + ms(1), [&, number] { next(number); });
      }
      first[number] = end->second.status;
      simulation.boot(number);
    };
    for (int number = 0; number < 3; ++number)
      simulation.at(ms(5'000), [&, number] { next(number); });
    ASSERT_THAT(simulation.run(ms(1'000'000)), IsEmpty()) << "seed " << seed;
    EXPECT_THAT(first, ElementsAre(std::pair(0, 0), std::pair(1, 0), std::pair(2, 0)));
    for (const auto& [number, end] : simulation.ends) EXPECT_EQ(end.status, 0) << end.why;
    ASSERT_EQ(simulation.launches[1001].size(), 3U) << "seed " << seed;
    waited += std::ranges::any_of(simulation.said, [](const std::string& line) {
      return line.find("waiting: an earlier job at this address is ending") != line.npos;
    });
  }
  EXPECT_GT(waited, 0U);
}

TEST(WaitingLauncher, ASpareSaysThatItIsOneAndWhoseItsPlaceWas) {
  Scenario scenario;
  scenario.hosts = 4;
  scenario.job_spec = {3, 3, 1};
  scenario.chaos_until = ms(1);
  Simulation simulation(scenario, 11);
  // One that has ranks and is not the coordinator.
  simulation.at(ms(10'000),
                [&] { simulation.power_off(simulation.launches.at(1).rbegin()->first); });
  EXPECT_THAT(simulation.run(ms(1'000'000)), IsEmpty());
  EXPECT_THAT(simulation.said,
              Contains(HasSubstr("3 places of the job are taken: this launcher is a "
                                 "spare, and starts when a host is lost")));
  EXPECT_THAT(simulation.said,
              Contains(ContainsRegex("restart 1 of 1, now; host[0-9] in place of")));
}

TEST(WaitingLauncher, OfAJobThatEndsWithoutItSaysSo) {
  Scenario scenario;
  scenario.hosts = 3;
  scenario.job_spec = {2, 2, 0};
  scenario.chaos_until = ms(1);
  Simulation simulation(scenario, 11);
  EXPECT_THAT(simulation.run(ms(1'000'000)), IsEmpty());
  std::vector<std::string> said;
  for (const auto& [number, end] : simulation.ends) {
    EXPECT_EQ(end.status, 0);
    said.push_back(end.why);
  }
  EXPECT_THAT(said, ::testing::UnorderedElementsAre(
                        "", "", "the job has ended; this launcher ran none of its last ranks"));
}

const std::map<std::string, std::string> kToken = {{"LOCKSTEP_TOKEN", "0123456789abcdef"}};

TEST(WaitingLauncher, SaysWhomItWaitsFor) {
  Job coordinator({"run", "--nnodes=2", "--rdzv-endpoint=127.0.0.1:0",
                   "--rdzv-conf=is_host=1,join_timeout=600", "true"},
                  {.environment = kToken});
  Job other({"run", "--nnodes=2", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-conf=is_host=0", "true"},
            {.environment = kToken});
  EXPECT_TRUE(coordinator.await_error("1 of 2 hosts have come"));
  EXPECT_THAT(coordinator.err(), HasSubstr("[lockstep] waiting at 127.0.0.1:"));
  EXPECT_TRUE(
      other.await_error("waiting for the coordinator at 127.0.0.1:1: nothing listens there yet; "
                        "this host waits for 600 s (--rdzv-conf join_timeout)"));
  kill(coordinator.pid(), SIGTERM);
  kill(other.pid(), SIGTERM);
  EXPECT_EQ(coordinator.wait().exit_code, 128 + SIGTERM);
  EXPECT_EQ(other.wait().exit_code, 128 + SIGTERM);
}

TEST(WaitingLauncher, NamesAProgramInItsPlaceAndTakesThePortOnceThatIsFree) {
  auto held = listen_at(Address::loopback(0));  // and is mute
  ASSERT_TRUE(held);
  Job job({"run", "--nnodes=1:2",
           fmt::format("--rdzv-endpoint=127.0.0.1:{}", local_address(held->get()).port()),
           "--rdzv-conf=last_call_timeout=0,heartbeat_timeout=0.4,keep_alive_interval=0.1", "echo",
           "here"},
          {.environment = kToken});
  EXPECT_TRUE(job.await_error("another program of this host holds the port"));
  held->reset();
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("here"));
}

TEST(Verbose, TellsHowTheStartProceeds) {
  const std::vector<std::string> rank = {"sh", "-c", "echo level $LOCKSTEP_LOG"};
  std::vector<std::string> args = {"run", "-v", "--nproc-per-node=2", "--rdzv-id=job"};
  args.insert(args.end(), rank.begin(), rank.end());
  const Result one = Job(args).wait();
  EXPECT_THAT(one.err,
              ContainsRegex("\\[lockstep\\] [0-9.]+ s: job job: 2 ranks of [^ ]*sh on this"));
  EXPECT_THAT(one.err, ContainsRegex("[0-9.]+ s: rank 0 is to listen at 127.0.0.1:[0-9]+"));
  EXPECT_THAT(one.err, ContainsRegex("[0-9.]+ s: started rank 1 as process [0-9]+"));
  EXPECT_THAT(one.out, HasSubstr("[rank 1] level info\n"));

  args = {"run", "--verbose", "--nnodes=1:2", "--rdzv-endpoint=127.0.0.1:0",
          "--rdzv-conf=is_host=1,last_call_timeout=0"};
  args.insert(args.end(), rank.begin(), rank.end());
  const Result several = Job(args, {.environment = kToken}).wait();
  EXPECT_THAT(several.err, ContainsRegex("listening at 127.0.0.1:[0-9]+: this launcher is the"));
  EXPECT_THAT(several.err,
              ContainsRegex("attempt 0: 1 ranks on 1 hosts, of which this one is number 0"));

  args = {"run"};
  args.insert(args.end(), rank.begin(), rank.end());
  const Result quiet = Job(args).wait();
  EXPECT_EQ(quiet.err, "");
  EXPECT_EQ(quiet.out, "level\n");
}

// A rank runs as the launcher's user, and may read what the kernel shows of it.
TEST(Token, IsNotInTheEnvironmentThatARankCanSee) {
  const std::string script =
      "echo own ${LOCKSTEP_TOKEN-gone}; tr '\\0' '\\n' < /proc/$PPID/environ | grep -c "
      "0123456789abcdef; "
      "tr '\\0' '\\n' < /proc/$PPID/environ | grep -c ^OTHER=";
  for (const std::vector<std::string>& flags : {std::vector<std::string>{},
                                                {"--nnodes=1:2", "--rdzv-endpoint=127.0.0.1:0",
                                                 "--rdzv-conf=is_host=1,last_call_timeout=0"}}) {
    std::vector<std::string> args = {"run"};
    args.insert(args.end(), flags.begin(), flags.end());
    args.insert(args.end(), {"sh", "-c", script});
    auto variables = kToken;
    variables["OTHER"] = "x";
    EXPECT_EQ(Job(args, {.environment = variables}).wait().out, "own gone\n0\n1\n");
  }
}

}  // namespace
}  // namespace lockstep::launch::testing
