// Waits with a limit, and for several operations at once.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "comm/group/transports.h"
#include "lockstep/core/error.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using std::chrono::milliseconds;
using test::message_of;
using test::name_of;

class GroupWaits : public test::OnTransports {};
INSTANTIATE_TEST_SUITE_P(On, GroupWaits, test::kTransports, name_of);

// The others' word in the store ends rank 0's wait, so no rank has to be fast.
TEST_P(GroupWaits, AWaitWithALimitGivesUpAndHarmsNothing) {
  run_together([](World& world) {
    at::Tensor sum = at::full({50000}, world.rank() + 1.f);
    const float expected = static_cast<float>(world.size() * (world.size() + 1)) / 2;
    if (world.rank() != 0) {
      (void)world.store().get("go");
      world.group().all_reduce(sum).wait();
    } else {
      Work work = world.group().all_reduce(sum);
      EXPECT_FALSE(work.wait_for(milliseconds(0)));
      EXPECT_FALSE(work.wait_for(milliseconds(5)));
      world.store().set("go", "");
      while (!work.wait_for(milliseconds(5))) {
      }
      EXPECT_TRUE(work.wait_for(milliseconds(0)));
    }
    EXPECT_EQ(sum[49999].item<float>(), expected);
    world.group().barrier().wait();
  });
}

// Between hosts a gather is the network's alone, and the sum has steps on every host.
TEST_P(GroupWaits, ManyShortWaitsDriveWhatWasStartedBefore) {
  run_together([](World& world) {
    const Group group = world.group();
    const at::Tensor sum = at::ones({1000}), own = at::full({3}, world.rank() + 1.f);
    std::vector<at::Tensor> all;
    for (int rank = 0; world.rank() == 0 && rank < world.size(); ++rank)
      all.push_back(at::empty({3}));
    Work first = group.all_reduce(sum);
    if (world.rank() != 0) first.wait();
    Work second = group.gather(all, own, 0);
    while (!second.wait_for(std::chrono::microseconds(100))) {
    }
    first.wait();
    EXPECT_EQ(sum[999].item<int64_t>(), world.size());
    for (size_t rank = 0; rank < all.size(); ++rank)
      EXPECT_EQ(all[rank][2].item<int64_t>(), rank + 1);
    group.barrier().wait();
  });
}

TEST_P(GroupWaits, AWaitWithALimitHoldsForWhatFollowsAndForStridedTensors) {
  run_together([](World& world) {
    const Group group = world.group();
    at::Tensor whole = at::ones({4, 2}), second = at::ones({3});
    const at::Tensor column = whole.select(1, 0);
    if (world.rank() != 0) (void)world.store().get("go");
    Work chain = then(group.all_reduce(column), [&] { return group.all_reduce(second); });
    if (world.rank() == 0) {
      EXPECT_FALSE(chain.wait_for(milliseconds(1)));
      world.store().set("go", "");
    }
    while (!chain.wait_for(milliseconds(2))) {
    }
    const auto n = static_cast<float>(world.size());
    EXPECT_TRUE(at::equal(column, at::full({4}, n)));
    EXPECT_TRUE(at::equal(whole.select(1, 1), at::ones({4})));
    EXPECT_EQ(second[2].item<float>(), n);
    group.barrier().wait();
  });
}

TEST_P(GroupWaits, AllOrAnyOfSeveral) {
  run([](World& world) {
    const Group& group = world.group();
    std::vector<at::Tensor> data;
    std::vector<Work> works;
    for (int i = 0; i < 6; ++i) {
      data.push_back(at::full({1000}, static_cast<float>(i)));
      works.push_back(group.all_reduce(data.back()));
    }
    std::vector<bool> over(works.size());
    for (size_t left = works.size(); left > 3; --left) {
      std::vector<Work> others;
      std::vector<size_t> which;
      for (size_t i = 0; i < works.size(); ++i) {
        if (over[i]) continue;
        others.push_back(works[i]);
        which.push_back(i);
      }
      const size_t i = which[wait_any(others)];
      over[i] = true;
      EXPECT_EQ(data[i][999].item<float>(), static_cast<float>(i) * world.size());
    }
    wait_all(works);
    for (int i = 0; i < 6; ++i)
      EXPECT_EQ(data[i][0].item<float>(), static_cast<float>(i) * world.size());
    std::vector<Work> none;
    EXPECT_EQ(message_of<ConfigError>([&] { (void)wait_any(none); }),
              "[comm] wait_any: no operations to wait for");
    std::vector<Work> chain{then(Work(), [] { return Work(); })};
    EXPECT_NE(message_of<ConfigError>([&] { (void)wait_any(chain); }).find("same order"),
              std::string::npos);
    group.barrier().wait();
  });
}

// The message that comes first, whichever it is, is taken first.
TEST_P(GroupWaits, AnyOfMessagesFromDifferentRanks) {
  run_together([](World& world) {
    const Group& group = world.group();
    const int last = world.size() - 1;
    at::Tensor word = at::full({2}, static_cast<float>(world.rank()));
    if (world.rank() == last) {
      group.send(word, 0).wait();
    } else if (world.rank() != 0) {
      (void)world.store().get("go");
      group.send(word, 0).wait();
    } else {
      std::vector<at::Tensor> words;
      std::vector<Work> works;
      for (int r = 1; r <= last; ++r) {
        words.push_back(at::zeros({2}));
        works.push_back(group.recv(words.back(), r));
      }
      EXPECT_EQ(wait_any(works), static_cast<size_t>(last - 1));
      EXPECT_EQ(words.back()[1].item<float>(), static_cast<float>(last));
      world.store().set("go", "");
      wait_all(works);
      EXPECT_EQ(words[0][0].item<float>(), 1.f);
    }
    group.barrier().wait();
  });
}

}  // namespace
}  // namespace lockstep::comm
