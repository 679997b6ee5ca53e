// A child that a rank makes by fork() has no part in the rank's groups, and harms nobody by having
// had their objects.
#include "support/fork.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "lockstep/comm/join.h"
#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using test::in_a_child;
using test::message_of;
using test::name_of;
using test::Ranks;
using test::spawn;
using test::spawn_bare;
using testing::AllOf;
using testing::HasSubstr;

void expect_sums(const Group& group) {
  for (const int64_t count : {3, 100000}) {
    at::Tensor sum = at::ones({count});
    group.all_reduce(sum).wait();
    EXPECT_TRUE(at::equal(sum, at::full({count}, static_cast<float>(group.size()))));
  }
}

class Forks : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(On, Forks,
                         testing::Values(Ranks{"shm", 2}, Ranks{"tcp", 3}, Ranks{"gloo", 2},
                                         Ranks{"auto", 4, {0, 0, 1, 1}}),
                         name_of);

TEST_P(Forks, AChildThatCallsIsRefused) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    expect_sums(group);
    at::Tensor late = at::ones({300000}), at_once = at::ones({3});
    Work over = group.all_reduce(at_once);
    over.wait();
    Work begun = group.all_reduce(late);
    const std::string own = std::to_string(getpid());
    world.store().set("one", "");
    in_a_child([&] {
      const auto expect_refused = [&](std::string_view what, const auto& call) {
        EXPECT_THAT(message_of<ConfigError>(call),
                    AllOf(HasSubstr("[comm] " + std::string(what) + ": "),
                          HasSubstr("belongs to process " + own), HasSubstr("fork()")));
      };
      expect_refused("barrier", [&] { (void)group.barrier(); });
      expect_refused("send", [&] { (void)group.send(late, (group.rank() + 1) % group.size()); });
      expect_refused("empty", [&] { (void)group.empty({3}); });
      expect_refused("shared", [&] { (void)group.shared({3}); });
      expect_refused("all_gather", [&] { (void)group.split(0); });
      expect_refused("wait", [&] { begun.wait(); });
      expect_refused("wait", [&] { (void)begun.wait_for(std::chrono::milliseconds(1)); });
      EXPECT_TRUE(begun.is_completed());  // wait() would throw at once
      over.wait();
      EXPECT_THAT(group.failure().value_or(""), HasSubstr("belongs to process " + own));
      group.abort("by a child");
      // Over a connection of its own.
      world.store().set(own, "child's");
      EXPECT_EQ(world.store().get(own), "child's");
      begun = {};
    });
    begun.wait();
    EXPECT_EQ(late[299999].item<float>(), static_cast<float>(world.size()));
    expect_sums(group);
    EXPECT_EQ(group.failure(), std::nullopt);
    EXPECT_EQ(world.store().get(own), "child's");
    group.barrier().wait();
  });
}

TEST_P(Forks, AChildDestroysItsCopiesWithoutAWord) {
  const Ranks ranks = GetParam();
  spawn_bare(ranks.count,
             [](int) {
               std::optional<World> world(World::from_env());
               std::optional<Group> part(world->group().split(0));
               at::Tensor own = world->group().empty({1000}), all = world->group().shared({1000});
               expect_sums(*part);
               world->store().set("mine", "");
               Work begun = world->group().all_reduce(own);
               Work chain = then(part->barrier(), [&] { return part->barrier(); });
               in_a_child([&] {
                 begun = {};
                 chain = {};
                 own.reset();
                 all.reset();
                 part.reset();
                 world.reset();
               });
               begun.wait();
               chain.wait();
               expect_sums(*part);
               expect_sums(world->group());
               world->store().set(std::to_string(world->rank()), "");
               world->group().barrier().wait();
             },
             {.backend = ranks.backend, .hosts = ranks.hosts});
}

TEST_P(Forks, AChildComesToItsEndAsAnyProcess) {
  const Ranks ranks = GetParam();
  spawn_bare(ranks.count,
             [](int) {
               static std::optional<World> world;
               static Work begun;
               world.emplace(World::from_env());
               at::Tensor late = at::ones({300000});
               begun = world->group().all_reduce(late);
               in_a_child([] { std::exit(0); });
               begun.wait();
               expect_sums(world->group());
               begun = {};
               world.reset();
             },
             {.backend = ranks.backend, .hosts = ranks.hosts});
}

TEST_P(Forks, ChildrenMakeGroupsOfTheirOwn) {
  const Ranks ranks = GetParam();
  std::string path = testing::TempDir() + "fork-XXXXXX";
  close(mkstemp(path.data()));
  spawn(ranks, [&](World& world) {
    expect_sums(world.group());
    in_a_child([&] {
      const auto store = c10::make_intrusive<c10d::FileStore>(path, world.size());
      const Group group = join_group(store, {world.rank(), world.size()});
      expect_sums(group);
      expect_sums(group.split(0));
    });
    expect_sums(world.group());
  });
  unlink(path.c_str());
}

TEST(ForkAlone, AChildOfOneRankGoesOn) {
  test::isolated([] {
    const World world = World::solo();
    at::Tensor one = at::ones({3});
    Work begun = then(world.group().barrier(), [&] { return world.group().all_reduce(one); });
    in_a_child([&] {
      begun.wait();
      world.group().all_reduce(one).wait();
      EXPECT_EQ(one[0].item<float>(), 1);
      EXPECT_EQ(world.group().split(0).size(), 1);
    });
    begun.wait();
  });
}

}  // namespace
}  // namespace lockstep::comm
