// Cores of ranks, and what the doctor says of a host.
#include "launch/process/binding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "launch/diagnosis/doctor.h"
#include "launch/job.h"
#include "launch/rendezvous/host.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Two nodes of two cores with two hardware threads each, in usable_cores()'s order.
const std::vector<Core> kEight = {{0, 0, 0}, {4, 0, 0}, {1, 0, 1}, {5, 0, 1},
                                  {2, 1, 2}, {6, 1, 2}, {3, 1, 3}, {7, 1, 3}};

TEST(Binding, RanksGetDisjointPartsThatLieTogether) {
  EXPECT_THAT(cores_of(Binding::Cores, 0, 4, kEight), ElementsAre(0, 4));
  EXPECT_THAT(cores_of(Binding::Cores, 3, 4, kEight), ElementsAre(3, 7));
  for (int ranks = 1; ranks <= 8; ++ranks) {
    std::multiset<int> all;
    for (int local = 0; local < ranks; ++local) {
      for (const int id : cores_of(Binding::Cores, local, ranks, kEight)) all.insert(id);
    }
    EXPECT_EQ(all, (std::multiset<int>{0, 1, 2, 3, 4, 5, 6, 7})) << ranks;
  }
}

TEST(Binding, MoreRanksThanCoresShareThem) {
  EXPECT_EQ(cores_of(Binding::Cores, 9, 10, kEight).size(), 1u);
}

TEST(Binding, NodesAreSharedOutEvenly) {
  EXPECT_THAT(cores_of(Binding::Numa, 0, 4, kEight), ElementsAre(0, 4, 1, 5));
  EXPECT_THAT(cores_of(Binding::Numa, 1, 4, kEight), ElementsAre(0, 4, 1, 5));
  EXPECT_THAT(cores_of(Binding::Numa, 3, 4, kEight), ElementsAre(2, 6, 3, 7));
}

TEST(Binding, ThreadsAreForTheTimeThatControlGroupsAllow) {
  EXPECT_EQ(threads_for(4, 2, std::nullopt), 4);
  EXPECT_EQ(threads_for(4, 2, 64), 4);
  EXPECT_EQ(threads_for(4, 2, 5), 2);
  EXPECT_EQ(threads_for(4, 2, 1), 1);
  EXPECT_EQ(threads_for(0, 2, std::nullopt), 1);
}

TEST(Binding, NoneIsAllCores) { EXPECT_THAT(cores_of(Binding::None, 0, 4, kEight), IsEmpty()); }

TEST(Binding, TheHostsCoresAreThoseThisProcessMayUse) {
  EXPECT_EQ(static_cast<int>(usable_cores().size()), cores());
}

TEST(Binding, RanksOfAJobAreBoundAndGetAsManyThreads) {
  const int ranks = cores();
  const std::string script =
      "echo $(grep Cpus_allowed_list /proc/self/status | cut -f2) $OMP_NUM_THREADS";
  const Result result =
      Job({"run", "--nproc-per-node=" + std::to_string(ranks), "--bind=cores", "sh", "-c", script},
          {.environment = {{"OMP_NUM_THREADS", ""}}})
          .wait();
  std::set<std::string> places;
  for (const std::string& line : lines_of(result.out)) {
    const std::string words = line.starts_with('[') ? line.substr(line.find("] ") + 2) : line;
    places.insert(words.substr(0, words.find(' ')));
    EXPECT_EQ(words.substr(words.find(' ')), " 1") << line;
  }
  EXPECT_EQ(static_cast<int>(places.size()), ranks) << result.out;
}

TEST(Binding, TorchrunsWordsAreKnown) {
  EXPECT_EQ(Job({"run", "--numa-binding=node", "echo", "x"}).wait().out, "x\n");
  const Result refused = Job({"run", "--numa_binding=socket", "true"}).wait();
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("--numa-binding socket"));
}

TEST(Doctor, LooksAtEverything) {
  std::string all;
  for (const Finding& finding : examine_host("libc.so.6")) {
    all += finding.what + "\n";
    EXPECT_EQ(finding.kind == Finding::Good, finding.cure.empty()) << finding.what;
  }
  for (const char* word : {"cores:", "memory:", "shared memory:", "open files:", "processes",
                           "ports:", "interfaces:", "clock", "GPUs:", "library: libc.so.6"}) {
    EXPECT_THAT(all, HasSubstr(word));
  }
}

TEST(Doctor, AProblemIsTheExitStatus) {
  const Result well = Job({"doctor"}).wait();
  EXPECT_THAT(well.out, HasSubstr("ok       cores:"));
  const Result ill =
      Job({"doctor"}, {.ignored_signals = {SIGXFSZ}, .most_file_bytes = 1 << 20}).wait();
  EXPECT_EQ(ill.exit_code, 1);
  EXPECT_THAT(ill.out, HasSubstr("PROBLEM  no 64 MiB of shared memory"));
}

}  // namespace
}  // namespace lockstep::launch::testing
