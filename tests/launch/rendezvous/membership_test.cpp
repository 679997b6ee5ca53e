// What launchers agree on, whatever the network and the hosts do: thousands of seeds of everything
// at once, and planted faults that the checks must find. Simulated time: no machine's speed is in
// it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/simulation.inl"
#include "launch/simulation_network.inl"

namespace lockstep::launch::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Time kLongest = std::chrono::hours(2);

Scenario chaos(uint64_t seed) {
  std::mt19937_64 random(seed * 7919 + 1);
  const auto upto = [&random](int most) {
    return static_cast<int>(random() % static_cast<unsigned>(most + 1));
  };
  Scenario scenario;
  scenario.hosts = 1 + upto(7);
  scenario.job_spec.max_nodes = scenario.hosts;
  scenario.job_spec.min_nodes = upto(1) == 0 ? scenario.hosts : 1 + upto(scenario.hosts - 1);
  scenario.job_spec.max_restarts = upto(1) == 0 ? 0 : upto(20);
  scenario.newcomers = upto(2);
  scenario.timing.join = ms(120'000);
  scenario.timing.last_call = ms(1'000 * upto(10));
  scenario.delay = ms(1 + upto(400));
  scenario.rank_failures = upto(2) == 0 ? 0.2 : 0;
  scenario.crashes = upto(2);
  scenario.power_offs = upto(1);
  scenario.partitions = upto(2);
  scenario.freezes = upto(1);
  scenario.interrupts = upto(9) == 0;
  scenario.notices = upto(9) < 3 ? upto(3) : 0;
  return scenario;
}

TEST(Membership, HoldsForEverySeed) {
  constexpr uint64_t kSeeds = 6000;
  uint64_t attempts = 0, restarted = 0, succeeded = 0, joined = 0, preempted = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Simulation simulation(chaos(seed), seed);
    ASSERT_THAT(simulation.run(kLongest), IsEmpty()) << "seed " << seed;
    attempts += simulation.attempts;
    restarted += simulation.attempts > 1;
    succeeded += simulation.ends.contains(0) && simulation.ends[0].status == 0;
    preempted += simulation.ends.contains(0) && simulation.ends[0].status == kRequeueStatus;
    for (const auto& text : simulation.said) joined += text.ends_with(" joins");
  }
  // The seeds reach what they are for.
  EXPECT_GT(attempts, kSeeds);
  EXPECT_GT(restarted, kSeeds / 10);
  EXPECT_GT(joined, kSeeds / 10);
  EXPECT_GT(succeeded, kSeeds / 10);
  EXPECT_GT(preempted, kSeeds / 100);
  EXPECT_LT(succeeded, kSeeds * 9 / 10);
}

// The first of that many seeds for which a check fails; the text says how.
std::string first_violation(Planted planted, uint64_t seeds) {
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    Scenario scenario = chaos(seed);
    scenario.planted = planted;
    Simulation simulation(scenario, seed);
    const auto violations = simulation.run(kLongest);
    if (!violations.empty()) return violations.front();
  }
  return "";
}

TEST(Membership, PlantedFaultsAreFound) {
  EXPECT_THAT(first_violation(Planted::HastyCoordinator, 6000), HasSubstr("still has ranks of"));
  EXPECT_THAT(first_violation(Planted::EndlessLease, 1000), HasSubstr("ranks of attempt"));
  EXPECT_THAT(first_violation(Planted::EarlyReady, 1000),
              AnyOf(HasSubstr("still has ranks of"), HasSubstr("over attempt"),
                    HasSubstr("leaves its ranks of")));
  EXPECT_THAT(first_violation(Planted::WrongSeats, 1000), HasSubstr("two hosts have rank"));
  EXPECT_THAT(first_violation(Planted::ForgottenLoss, 1000), HasSubstr("has not ended"));
}

TEST(Membership, LostOrdersEndInBoundedTime) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    for (const Planted planted : {Planted::LostStop, Planted::LostEnd}) {
      Scenario scenario = chaos(seed);
      scenario.planted = planted;
      Simulation simulation(scenario, seed);
      ASSERT_THAT(simulation.run(kLongest), IsEmpty()) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace lockstep::launch::testing
