// What the hosts of a job must have in common, and what a coordinator knows of those before it: two
// jobs at one endpoint, other timeouts, a coordinator that was killed and replaced at once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/job.h"
#include "launch/rendezvous/coordinator/coordinator.h"
#include "launch/rendezvous/coordinator/job_spec.h"
#include "launch/simulation.inl"
#include "launch/simulation_network.inl"

namespace lockstep::launch::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const JobSpec kTwo{.min_nodes = 2, .max_nodes = 2};

JobSpec with_command(const std::vector<std::string>& command) {
  JobSpec job_spec = kTwo;
  set_command(job_spec, command);
  return job_spec;
}

Join host(int number, const JobSpec& job_spec) {
  return {.launcher = static_cast<uint64_t>(number) + 100,
          .host = fmt::format("h{}", number),
          .address = fmt::format("10.0.0.{}", number),
          .job_spec = job_spec};
}

// What the coordinator of a job with `job` answers to a host with `other`.
std::string refusal(const JobSpec& job, const JobSpec& other) {
  Coordinator coordinator(job, {}, "", ms(0));
  coordinator.place(host(0, job), ms(0));
  const Message answer = coordinator.place(host(1, other), ms(1));
  const auto* refuse = std::get_if<Refuse>(&answer);
  return refuse == nullptr ? "" : refuse->reason;
}

TEST(Agreement, OtherTimeoutsAreRefusedWithBothValues) {
  JobSpec other = kTwo;
  other.grace = ms(30'000);
  EXPECT_EQ(refusal(kTwo, other),
            "h1 was started with --grace 30, the job has no --grace: start all hosts with the same "
            "options");
  other = kTwo;
  other.lease = ms(60'000);
  EXPECT_EQ(refusal(kTwo, other),
            "h1 was started with --rdzv-conf heartbeat_timeout=60, the job has --rdzv-conf "
            "heartbeat_timeout=5: start all hosts with the same options");
  other.max_nodes = 3;
  EXPECT_THAT(refusal(kTwo, other), HasSubstr("--nnodes 2:3 and --rdzv-conf heartbeat_timeout=60"));
  EXPECT_EQ(refusal(kTwo, kTwo), "");
}

TEST(Agreement, AnotherCommandIsRefusedWithBoth) {
  const JobSpec job = with_command({"/home/a/train", "--lr", "0.1"});
  EXPECT_THAT(refusal(job, with_command({"eval"})),
              AllOf(HasSubstr("h1 was started with the command 'eval', the job has the command "
                              "'train --lr 0.1'"),
                    HasSubstr("--rdzv-id"), HasSubstr("same_command=0")));
  EXPECT_THAT(refusal(job, with_command({"train", "--lr", "0.2"})), HasSubstr("--lr 0.2'"));
  EXPECT_THAT(refusal(job, with_command({"train", "--lr 0.1"})), Not(IsEmpty()));
  // Folders may have other names on other hosts.
  EXPECT_EQ(refusal(job, with_command({"/home/b/train", "--lr", "0.1"})), "");
  // Where all are told so, commands may differ; one that is told alone is another job's.
  EXPECT_EQ(refusal(kTwo, kTwo), "");
  EXPECT_THAT(refusal(job, kTwo), HasSubstr("--rdzv-conf same_command=0, the job has --rdzv-conf "
                                            "same_command=1"));
}

TEST(Agreement, LongCommandsAreQuotedWhereTheyDiffer) {
  const std::string path(3000, 'x');
  const std::string text = refusal(with_command({"train", path.substr(0, 500), "--seed=1", path}),
                                   with_command({"train", path.substr(0, 500), "--seed=2", path}));
  EXPECT_THAT(text, AllOf(HasSubstr("xx --seed=2 xx"), HasSubstr("xx --seed=1 xx")));
  EXPECT_LT(text.size(), 600U);
}

// Two hosts run; the third is new to the job.
Scenario two_and_one(int restarts) {
  Scenario scenario;
  scenario.hosts = 3;
  scenario.job_spec = {2, 2, restarts};
  scenario.chaos_until = ms(1);
  scenario.coordinator_comes_back = true;
  return scenario;
}

// By a coordinator in the place of the first one.
bool started_again(const Simulation& simulation) { return simulation.attempts > 1000; }

int other_with_ranks(const Simulation& simulation) {
  return simulation.launches.at(1).rbegin()->first;
}

TEST(ReplacedCoordinator, WaitsForRanksOfItsPredecessorOnHostsThatComeToo) {
  for (const int restarts : {0, 3}) {
    for (uint64_t seed = 0; seed < 50; ++seed) {
      Simulation simulation(two_and_one(restarts), seed);
      // Of the other two one is a spare: a launcher in its place knows nothing of the job.
      simulation.at(ms(10'000), [&] { simulation.crash(3 - other_with_ranks(simulation)); });
      simulation.at(ms(15'000), [&] {
        simulation.crash(0);
        simulation.boot(0);
        simulation.boot(3 - other_with_ranks(simulation));
      });
      ASSERT_THAT(simulation.run(ms(1'000'000)), IsEmpty()) << "seed " << seed;
      ASSERT_TRUE(started_again(simulation)) << "seed " << seed;
    }
  }
}

TEST(ReplacedCoordinator, WaitsForAHostThatIsCutOffWhenAnyOtherOneKnowsOfIt) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Simulation simulation(two_and_one(3), seed);
    simulation.at(ms(15'000), [&] {
      simulation.cut({other_with_ranks(simulation)}, ms(1'000'000));
      simulation.crash(0);
      simulation.boot(0);
    });
    ASSERT_THAT(simulation.run(ms(1'000'000)), IsEmpty()) << "seed " << seed;
    ASSERT_TRUE(started_again(simulation)) << "seed " << seed;
  }
}

TEST(ReplacedCoordinator, StartsAtOnceWhenAllOfTheLastStartAreBack) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Scenario scenario = two_and_one(3);
    scenario.hosts = 2;
    scenario.timing.stop = ms(100);
    scenario.timing.lease = ms(30'000);
    scenario.timing.interval = ms(1'000);
    Simulation simulation(scenario, seed);
    Time again{};
    simulation.at(ms(15'000), [&] {
      simulation.crash(0);
      simulation.boot(0);
    });
    simulation.at(ms(18'000), [&] { again = started_again(simulation) ? ms(1) : ms(0); });
    ASSERT_THAT(simulation.run(ms(1'000'000)), IsEmpty()) << "seed " << seed;
    EXPECT_EQ(again, ms(1)) << "seed " << seed;
  }
}

// It numbers the next restart (TORCHELASTIC_RESTART_COUNT, attempt_N) as its predecessor would
// have.
TEST(ReplacedCoordinator, GoesOnWithTheNumbersOfItsPredecessor) {
  Coordinator coordinator(kTwo, {.survivors = ms(0)}, "", ms(0));
  coordinator.place(host(0, kTwo), ms(0));
  coordinator.receive(1, Ready{}, ms(0));
  JobSpec other_spec = kTwo;
  other_spec.max_restarts = 1;
  Join stranger = host(2, other_spec);
  stranger.past = {.coordinator = 8, .attempt = 9};
  coordinator.place(stranger, ms(1));  // refused, and of another job
  Join survivor = host(1, kTwo);
  survivor.past = {.coordinator = 7, .attempt = 4, .hosts = 2, .id = 2};
  EXPECT_EQ(coordinator.place(survivor, ms(2)),
            Message(Welcome{.id = 2, .coordinator = 100, .attempt = 4, .hosts = 0}));
  coordinator.receive(2, Ready{.attempt = 4}, ms(3));
  coordinator.tick(coordinator.deadline(ms(3)).value_or(ms(3)));
  ASSERT_EQ(coordinator.phase(), Coordinator::Phase::Running);
  EXPECT_EQ(coordinator.attempt(), 5U);
  const auto broadcasts = coordinator.take_broadcasts();
  ASSERT_TRUE(std::holds_alternative<Start>(broadcasts.back()));
  EXPECT_EQ(std::get<Start>(broadcasts.back()).attempt, 5U);
}

// It has started nothing, so that it cannot know that no host is missing.
TEST(ReplacedCoordinator, WaitsForMoreHostsThanTheLeast) {
  const JobSpec elastic{.min_nodes = 2, .max_nodes = 3};
  const Timing timing{.survivors = ms(0)};
  Coordinator coordinator(elastic, timing, "", ms(0));
  coordinator.place(host(0, elastic), ms(0));
  coordinator.receive(1, Ready{}, ms(0));
  Join survivor = host(1, elastic);
  survivor.past = {.coordinator = 7, .attempt = 4, .hosts = 2, .id = 2};
  coordinator.place(survivor, ms(1));
  coordinator.receive(2, Ready{.attempt = 4}, ms(1));
  coordinator.tick(timing.last_call);
  EXPECT_EQ(coordinator.phase(), Coordinator::Phase::Gathering);
  coordinator.tick(timing.last_call + ms(1));
  EXPECT_EQ(coordinator.phase(), Coordinator::Phase::Running);
}

TEST(ReplacedCoordinator, NoTwoEpochsMeetForAnySeedOfCrashes) {
  uint64_t replaced = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    std::mt19937_64 random(seed * 7919 + 5);
    const auto upto = [&random](int most) {
      return static_cast<int>(random() % static_cast<unsigned>(most + 1));
    };
    Scenario scenario;
    scenario.coordinator_comes_back = true;
    scenario.hosts = 2 + upto(4);
    scenario.newcomers = upto(2);
    scenario.job_spec.max_nodes = scenario.hosts;
    scenario.job_spec.min_nodes = 1 + upto(scenario.hosts - 1);
    scenario.job_spec.max_restarts = upto(1) == 0 ? 0 : 20;
    scenario.timing.join = ms(60'000);
    scenario.timing.last_call = ms(1'000 * upto(3));
    scenario.crashes = 3 + upto(5);
    scenario.rank_failures = upto(2) == 0 ? 0.2 : 0;
    Simulation simulation(scenario, seed);
    ASSERT_THAT(simulation.run(std::chrono::hours(2)), IsEmpty()) << "seed " << seed;
    replaced += started_again(simulation);
  }
  EXPECT_GT(replaced, 200U);
}

// A job of two launchers runs; another one comes to its endpoint with its token and without a name.
TEST(TwoJobsAtOneEndpoint, TheSecondIsRefusedWithBothCommandsNamedAndTheFirstGoesOn) {
  const TwoHosts hosts;
  const std::vector<std::string> rank = {"sh", "-c", "echo here; read line; exit 0"};
  const auto with = [&](int host, std::vector<std::string> flags,
                        const std::vector<std::string>& command) {
    flags.insert(flags.end(), command.begin(), command.end());
    return hosts.args(host, std::move(flags));
  };
  Job first(with(0, {}, rank), TwoHosts::with_token());
  Job second(with(1, {}, rank), TwoHosts::with_token());
  EXPECT_TRUE(first.await("here"));
  EXPECT_TRUE(second.await("here"));

  const Result other = Job(with(1, {}, {"eval", "--all"}), TwoHosts::with_token()).wait();
  EXPECT_EQ(other.exit_code, 127);  // no such program here: named before anybody is asked
  const Result another =
      Job(with(1, {}, {"sh", "-c", "echo another"}), TwoHosts::with_token()).wait();
  EXPECT_EQ(another.exit_code, 2);
  EXPECT_THAT(another.err, AllOf(HasSubstr("refuses this host"), HasSubstr("'sh -c echo another'"),
                                 HasSubstr("'sh -c echo here; read line; exit 0'")));
  EXPECT_TRUE(first.await_error("the command 'sh -c echo another'"));
  const Result graceful = Job(with(1, {"--grace=30"}, rank), TwoHosts::with_token()).wait();
  EXPECT_EQ(graceful.exit_code, 2);
  EXPECT_THAT(graceful.err, HasSubstr("--grace 30, the job has no --grace"));

  kill(first.pid(), SIGTERM);
  EXPECT_EQ(first.wait().exit_code, 128 + SIGTERM);
  EXPECT_EQ(second.wait().exit_code, 128 + SIGTERM);
}

}  // namespace
}  // namespace lockstep::launch::testing
