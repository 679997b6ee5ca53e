// Operations whose handles are dropped, and operations that ranks wait for in different orders.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "support/spawn.h"

namespace lockstep::comm {
namespace {

using test::name_of;
using test::Ranks;
using test::spawn;

class Dropped : public testing::TestWithParam<Ranks> {
 protected:
  static void run(const std::function<void(const Group&)>& body) {
    spawn(GetParam(), [&](World& world) { body(world.group()); });
  }
};

INSTANTIATE_TEST_SUITE_P(On, Dropped,
                         testing::Values(Ranks{"shm", 1}, Ranks{"shm", 2}, Ranks{"shm", 3},
                                         Ranks{"tcp", 2}, Ranks{"tcp", 3}, Ranks{"gloo", 2},
                                         Ranks{"auto", 4, {0, 0, 1, 1}}),
                         name_of);

// Larger than what any transport holds on the way.
constexpr int64_t kLarge = 300000;

at::Tensor filled(int64_t count, int64_t value) { return at::full({count}, value, at::kFloat); }
at::Tensor every_other(const at::Tensor& whole) { return whole.slice(0, 0, whole.size(0), 2); }
bool is_all(const at::Tensor& tensor, int64_t value) {
  return at::equal(tensor, at::full_like(tensor, value));
}
int next_to(const Group& group) { return (group.rank() + 1) % group.size(); }
int before(const Group& group) { return (group.rank() + group.size() - 1) % group.size(); }

TEST_P(Dropped, AllReduceIsOverAfterTheNextWait) {
  run([](const Group& group) {
    for (const int64_t count : {int64_t{6}, kLarge}) {
      for (const bool strided : {false, true}) {
        for (const bool in_group_memory : {false, true}) {
          at::Tensor whole = in_group_memory ? group.empty({2 * count}) : at::empty({2 * count});
          at::Tensor data =
              strided ? every_other(whole.fill_(1)) : whole.fill_(1).narrow(0, 3, count);
          { const Work dropped = group.all_reduce(data); }
          group.barrier().wait();
          EXPECT_TRUE(is_all(data, group.size())) << count << (strided ? " strided" : "");
          EXPECT_EQ(whole.sum().item<int64_t>(), count * group.size() + count);
        }
      }
    }
  });
}

// Their parts belong to the group as they do.
TEST_P(Dropped, ListsAndMessagesAreAskedWhetherTheyAreOver) {
  run([](const Group& group) {
    at::Tensor a = at::ones({4}), b = at::ones({5}), got = at::zeros({4});
    { const Work dropped = group.all_reduce(std::vector<at::Tensor>{a, b}); }
    { const Work dropped = group.send_recv(got, at::ones({4}), {next_to(group), before(group)}); }
    Work barrier = group.barrier();
    while (!barrier.is_completed()) std::this_thread::yield();
    barrier.wait();
    EXPECT_TRUE(is_all(a, group.size()) && is_all(b, group.size()) && is_all(got, 1));
  });
}

TEST_P(Dropped, ACallOnTheSameTensorComesAfterIt) {
  run([](const Group& group) {
    at::Tensor whole = at::ones({20}), data = every_other(whole);
    for (int i = 0; i < 3; ++i) {
      const Work dropped = group.all_reduce(data);
    }
    group.all_reduce(data).wait();
    const int64_t size = group.size();
    EXPECT_TRUE(is_all(data, size * size * size * size));
    group.barrier().wait();
    EXPECT_EQ(whole.sum().item<int64_t>(), 10 * size * size * size * size + 10);
  });
}

// Rank 0 would wait for the others, which wait for its message.
TEST_P(Dropped, ACallOnMemoryOnBothSidesOfItsMemoryDoesNotWaitForIt) {
  if (GetParam().count == 1) return;  // nobody to wait for
  run([](const Group& group) {
    const Group other = group.split(0);
    at::Tensor all = at::ones({group.size() + 1}), token = at::ones({1});
    at::Tensor middle = all.narrow(0, 1, 1);
    std::vector<at::Tensor> around{all.narrow(0, 0, 1)};
    for (int r = 1; r < group.size(); ++r) around.push_back(all.narrow(0, r + 1, 1));
    if (group.rank() > 0) other.recv(token, 0).wait();
    { const Work dropped = group.all_reduce(middle); }
    Work gathered = group.all_gather(around, filled(1, group.rank()));
    for (int r = 1; r < group.size() && group.rank() == 0; ++r) other.send(token, r).wait();
    gathered.wait();
    EXPECT_TRUE(is_all(middle, group.size()));
    for (int r = 0; r < group.size(); ++r) EXPECT_TRUE(is_all(around[r], r));
  });
}

TEST_P(Dropped, MessagesAreOverAfterTheNextWait) {
  if (GetParam().count == 1) return;  // nobody to write to
  run([](const Group& group) {
    for (const bool strided : {false, true}) {
      at::Tensor from = filled(2 * kLarge, group.rank() + 1), to = at::zeros({2 * kLarge});
      at::Tensor in = strided ? every_other(to) : to.narrow(0, 5, kLarge);
      {
        const Work sent =
            group.send(strided ? every_other(from) : from.narrow(0, 7, kLarge), next_to(group));
        const Work received = group.recv(in, before(group));
      }
      group.barrier().wait();
      EXPECT_TRUE(is_all(in, before(group) + 1)) << (strided ? "strided" : "");
      group.barrier().wait();
    }
  });
}

// A message that is received only after the next collective must not stop that.
TEST_P(Dropped, AMessageThatIsReceivedLaterHoldsNobodyUp) {
  if (GetParam().count == 1) return;  // nobody to write to
  run([](const Group& group) {
    at::Tensor out = filled(kLarge, group.rank()), in = at::zeros({kLarge}),
               sum = at::ones({kLarge});
    if (group.rank() == 0) {
      { const Work dropped = group.send(out, 1); }
      group.all_reduce(sum).wait();
    } else {
      group.all_reduce(sum).wait();
      if (group.rank() == 1) group.recv(in, 0).wait();
    }
    EXPECT_TRUE(is_all(sum, group.size()));
    EXPECT_TRUE(is_all(in, 0));
  });
}

TEST_P(Dropped, ThenRunsBeforeTheNextCallOrAtTheEndOfTheNextWait) {
  run([](const Group& group) {
    const int64_t size = group.size();
    std::string order;
    at::Tensor first = at::ones({kLarge}), second = at::ones({7});
    const auto chain = [&](const char* name) {
      return then(group.all_reduce(first), [&order, &second, &group, name] {
        order += name;
        return group.all_reduce(second);
      });
    };
    const Work kept = group.barrier();
    { const Work dropped = chain("a"); }
    EXPECT_EQ(order, "");
    Work next = group.barrier();
    EXPECT_EQ(order, "a");
    EXPECT_TRUE(is_all(second, size));
    { const Work dropped = chain("b"); }
    next.wait();
    EXPECT_EQ(order, "ab");
    EXPECT_TRUE(is_all(second, size * size));
    EXPECT_TRUE(is_all(first, size * size));
  });
}

// On a rank that has nothing to do first: Work() belongs to no group.
TEST_P(Dropped, ThenBehindNothingRunsBeforeTheNextCallOrAtTheEndOfTheNextWait) {
  run([](const Group& group) {
    const Group alone = group.split(group.rank());
    const int64_t size = group.size();
    std::string order;
    at::Tensor data = at::ones({7});
    const auto drop = [&](Work first, const char* name) {
      const Work dropped = then(std::move(first), [&order, &data, &group, name] {
        order += name;
        return group.all_reduce(data);
      });
    };
    Work kept = group.barrier();
    drop(Work(), "a");
    EXPECT_EQ(order, "");
    Work next = group.barrier();
    EXPECT_EQ(order, "a");
    drop(Work(), "b");
    drop(then(Work(), [] { return Work(); }), "c");
    next.wait();
    EXPECT_EQ(order, "abc");
    drop(alone.barrier(), "d");
    alone.barrier().wait();
    EXPECT_EQ(order, "abcd");
    EXPECT_TRUE(is_all(data, size * size * size * size));
    kept.wait();
  });
}

// On the ranks that drop it as on the one that waits for it.
TEST_P(Dropped, ThenRunsBeforeMemoryIsMade) {
  run([](const Group& group) {
    for (const bool shared : {false, true}) {
      const at::Tensor data = at::ones({7});
      {
        Work chain = then(group.barrier(), [&] { return group.all_reduce(data); });
        if (group.rank() == 0) chain.wait();
      }
      const at::Tensor memory = shared ? group.shared({5}) : group.empty({5});
      EXPECT_TRUE(is_all(data, group.size()));
    }
  });
}

TEST_P(Dropped, ThenRunsBeforeTheNextListIsRead) {
  run([](const Group& group) {
    const at::Tensor first = at::ones({3}), second = at::ones({4});
    const auto drop = [&](float value) {
      const Work dropped = then(Work(), [&first, value] {
        first.fill_(value);
        return Work();
      });
    };
    drop(2);
    group.all_reduce(std::vector{first, second}).wait();
    EXPECT_TRUE(is_all(first, 2 * group.size()) && is_all(second, group.size()));
    drop(3);
    group.send_recv(first, first, {.to = next_to(group), .from = before(group)}).wait();
    EXPECT_TRUE(is_all(first, 3));
  });
}

TEST_P(Dropped, AskingMovesWhatWasDroppedToo) {
  run([](const Group& group) {
    at::Tensor whole = at::ones({2 * kLarge}), data = every_other(whole);
    { const Work dropped = group.all_reduce(data); }
    Work barrier = group.barrier();
    while (!barrier.is_completed()) std::this_thread::yield();
    barrier.wait();
    EXPECT_TRUE(is_all(data, group.size()));
    group.barrier().wait();
  });
}

TEST_P(Dropped, AGroupThatGoesAwayIsLeftWithoutAWord) {
  run([](const Group& group) {
    {
      const Group part = group.split(0);
      at::Tensor data = at::ones({4});
      const Work dropped = part.all_reduce(data);
    }
    // Others may still be connecting, by the store that rank 0 serves until it ends.
    group.barrier().wait();
  });
}

class Order : public Dropped {};
INSTANTIATE_TEST_SUITE_P(On, Order,
                         testing::Values(Ranks{"shm", 2}, Ranks{"shm", 3}, Ranks{"tcp", 2},
                                         Ranks{"tcp", 3}, Ranks{"gloo", 2},
                                         Ranks{"auto", 4, {0, 0, 1, 1}},
                                         Ranks{"auto", 4, {0, 1, 0, 1}}),
                         name_of);

TEST_P(Order, EachRankWaitsInItsOwn) {
  run([](const Group& group) {
    std::vector<at::Tensor> data;
    std::vector<Work> works;
    for (int i = 0; i < 8; ++i) {
      data.push_back(i % 2 ? group.empty({kLarge}) : at::empty({i % 4 ? kLarge : 10}));
      data.back().fill_(i);
      works.push_back(i % 3 ? group.all_reduce(data.back()) : group.broadcast(data.back(), 0));
    }
    for (size_t i = 0; i < works.size(); ++i) {
      works[(i * (2 * group.rank() + 1) + group.rank()) % works.size()].wait();
    }
    for (int i = 0; i < 8; ++i) EXPECT_TRUE(is_all(data[i], i % 3 ? i * group.size() : i)) << i;
  });
}

// Even ranks wait for the collective first, odd ones for the message; and the other way round.
TEST_P(Order, MessagesAndCollectives) {
  run([](const Group& group) {
    for (const int first : {0, 1}) {
      for (const bool in_group_memory : {false, true}) {
        at::Tensor sum = in_group_memory ? group.empty({kLarge}) : at::empty({kLarge});
        sum.fill_(1);
        at::Tensor out = filled(kLarge, group.rank()), in = at::zeros({kLarge});
        Work reduced = group.all_reduce(sum);
        const bool collective_first = group.rank() % 2 == first;
        if (collective_first) reduced.wait();
        Work sent = group.send(out, next_to(group)), received = group.recv(in, before(group));
        if (collective_first) sent.wait();
        received.wait();
        if (!collective_first) reduced.wait();
        sent.wait();
        EXPECT_TRUE(is_all(sum, group.size()));
        EXPECT_TRUE(is_all(in, before(group)));
      }
    }
  });
}

// What a thread_local object does in its destructor comes after the end of younger ones, the
// library's among them.
struct AtTheEnd {
  std::function<void()> call;
  ~AtTheEnd() {
    if (call) call();
  }
};

TEST_P(Order, CallsInTheDestructorsOfAThread) {
  run([](const Group& group) {
    at::Tensor sum = at::ones({10});
    std::thread([&] {
      thread_local AtTheEnd at_the_end;
      at_the_end.call = [&] {
        // Whatever was freed has other contents by now.
        std::vector<std::unique_ptr<std::string>> others;
        for (size_t size = 16; size < 512; ++size)
          others.push_back(std::make_unique<std::string>(size, '\xff'));
        group.all_reduce(sum).wait();
        (void)then(Work(), [] { return Work(); });
        group.barrier().wait();
      };
      group.barrier().wait();
    }).join();
    EXPECT_TRUE(is_all(sum, group.size()));
  });
}

// A process's static objects go after all of that, in any order that its sources have.
TEST_P(Order, CallsAndOperationsOfStaticObjects) {
  const Ranks ranks = GetParam();
  test::spawn_bare(ranks.count,
                   [](int) {
                     static Work unfinished;
                     static std::optional<World> world;
                     static Group part;
                     static AtTheEnd at_the_end;
                     world.emplace(World::from_env());
                     part = world->group().split(0);
                     at::Tensor sum = at::ones({kLarge});
                     at_the_end.call = [sum] {
                       world->group().all_reduce(sum).wait();
                       (void)then(Work(), [] { return Work(); });
                       part.barrier().wait();
                       if (!is_all(sum, part.size())) _exit(7);
                     };
                     unfinished = then(part.all_reduce(sum.clone()), [] { return Work(); });
                     std::exit(0);
                   },
                   {.backend = ranks.backend, .hosts = ranks.hosts});
}

// One rank has started a collective and waits for a message that the other sends after the
// collective.
TEST_P(Order, AMessageBehindACollective) {
  run([](const Group& group) {
    at::Tensor sum = at::ones({kLarge}), text = filled(kLarge, group.rank());
    Work reduced = group.all_reduce(sum);
    const int last = group.size() - 1;
    if (group.rank() == 0) group.recv(text, last).wait();
    reduced.wait();
    if (group.rank() == last) group.send(text, 0).wait();
    EXPECT_TRUE(is_all(sum, group.size()));
    EXPECT_TRUE(is_all(text, group.rank() == 0 ? last : group.rank()));
  });
}

}  // namespace
}  // namespace lockstep::comm
