// Which parameters travel together, in which order, and when.
#include "parallel/ddp/buckets/buckets.h"

#include "parallel/ddp/buckets/schedule.h"
#include "parallel/ddp/fake_transport.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using parallel::assign_buckets;
using parallel::Assignment;
using parallel::BucketSchedule;
using parallel::Named;
using ::testing::ElementsAre;

// Parameters of the given numbers of bytes.
std::vector<Named> floats(const std::vector<int64_t>& bytes) {
  std::vector<Named> named;
  for (int64_t size : bytes) named.push_back({"", at::empty({size / 4})});
  return named;
}

TEST(AssignBuckets, B09_ABucketClosesWhenItReachesItsLimit) {
  isolated([] {
    EXPECT_EQ(
        assign_buckets(floats({40, 40, 40, 40, 40}), {0, 1, 2, 3, 4}, {.bucket_bytes = {40, 80}}),
        (Assignment{{0}, {1, 2}, {3, 4}}));
  });
}

TEST(AssignBuckets, B09_TheOrderIsTheCallers) {
  isolated([] {
    EXPECT_EQ(assign_buckets(floats({40, 40, 40}), {2, 0, 1}, {.bucket_bytes = {80, 80}}),
              (Assignment{{2, 0}, {1}}));
  });
}

TEST(AssignBuckets, B09_EachDtypeHasItsOwnInOrderOfTheLastMembers) {
  isolated([] {
    auto named = floats({40, 40, 40});
    named[1].tensor = named[1].tensor.to(at::kDouble);
    EXPECT_EQ(assign_buckets(named, {0, 1, 2}, {.bucket_bytes = {80, 80}}),
              (Assignment{{1}, {0, 2}}));
  });
}

TEST(AssignBuckets, OneLargerThanTheLimitIsABucketOfItsOwn) {
  isolated([] {
    EXPECT_EQ(assign_buckets(floats({4000, 4, 4}), {0, 1, 2}, {.bucket_bytes = {8, 8}}),
              (Assignment{{0}, {1, 2}}));
  });
}

// Registered against the order of use, so that gradients arrive in registration order.
struct Backwards : torch::nn::Module {
  Backwards() {
    last = register_module("last", torch::nn::Linear(4, 4));
    middle = register_module("middle", torch::nn::Linear(4, 4));
    first = register_module("first", torch::nn::Linear(4, 4));
  }
  at::Tensor loss() {
    return last(torch::tanh(middle(torch::tanh(first(at::ones({2, 4})))))).square().mean();
  }
  at::Tensor loss_the_other_way() {
    return first(torch::tanh(middle(torch::tanh(last(at::ones({2, 4})))))).square().mean();
  }
  torch::nn::Linear last{nullptr}, middle{nullptr}, first{nullptr};
};

constexpr int64_t kLayerBytes = (4 * 4 + 4) * 4;

TEST(Buckets, B13_RebuiltOnceInTheOrderOfArrival) {
  isolated([] {
    std::vector<std::string> journal;
    Backwards net;
    Ddp ddp(net, Group(std::make_shared<FakeTransport>(journal)),
            {.bucket_bytes = {kLayerBytes, kLayerBytes}});
    EXPECT_FALSE(ddp.rebuilt());
    ASSERT_EQ(ddp.buckets().size(), 3U);
    EXPECT_THAT(ddp.buckets()[0].names, ElementsAre("first.bias", "first.weight"));
    // Another order of arrival in the second pass changes nothing any more.
    for (const bool other_way : {false, true}) {
      (other_way ? net.loss_the_other_way() : net.loss()).backward();
      EXPECT_TRUE(ddp.rebuilt());
      ASSERT_EQ(ddp.buckets().size(), 3U);
      const char* layers[] = {"last", "middle", "first"};
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(ddp.buckets()[i].bytes, kLayerBytes);
        EXPECT_THAT(ddp.buckets()[i].names,
                    ::testing::UnorderedElementsAre(std::string(layers[i]) + ".bias",
                                                    std::string(layers[i]) + ".weight"));
      }
    }
  });
}

TEST(Buckets, RebuildingKeepsTheGradients) {
  isolated([] {
    std::vector<std::string> journal;
    torch::manual_seed(0);
    Backwards net;
    Ddp ddp(net, Group(std::make_shared<FakeTransport>(journal)),
            {.bucket_bytes = {kLayerBytes, kLayerBytes}});
    torch::manual_seed(0);
    Backwards plain;
    for (int pass = 0; pass < 2; ++pass) {
      net.loss().backward();
      plain.loss().backward();
      expect_equal(gradients(net), gradients(plain));
    }
  });
}

// Registration order agrees with use, so that buckets are right from the first backward on.
TEST(Buckets, B12_CommunicationStartsWhileBackwardStillRunsFromTheFirstStepOn) {
  isolated([] {
    std::vector<std::string> journal;
    Mlp net;
    for (const auto& item : net.named_parameters()) {
      const auto name = item.key();
      item.value().register_hook([&journal, name](const at::Tensor&) { journal.push_back(name); });
    }
    Ddp ddp(net, Group(std::make_shared<FakeTransport>(journal)), {.bucket_bytes = {100, 200}});
    for (int step = 0; step < 2; ++step) {
      journal.clear();
      square_loss(net, 0).backward();
      const auto at = [&](const std::string& entry) {
        return std::find(journal.begin(), journal.end(), entry) - journal.begin();
      };
      EXPECT_LT(at("third.weight"), at("reduce bucket 0"));
      EXPECT_LT(at("reduce bucket 0"), at("second.weight"));
      EXPECT_LT(at("reduce bucket 1"), at("first.weight"));
      EXPECT_EQ(journal.back(), "reduce bucket 2");
      EXPECT_EQ(journal.size(), 6U + 3U);
    }
  });
}

TEST(Buckets, AnUnusedParameterDelaysButDoesNotReorderBuckets) {
  isolated([] {
    std::vector<std::string> journal;
    Mlp net;
    Ddp ddp(net, Group(std::make_shared<FakeTransport>(journal)), {.bucket_bytes = {100, 200}});
    net.first(input(0)).square().mean().backward();
    EXPECT_THAT(journal, ElementsAre("reduce bucket 0", "reduce bucket 1", "reduce bucket 2"));
  });
}

TEST(Buckets, HoldStartsNothing) {
  isolated([] {
    std::vector<std::string> journal;
    Mlp net;
    Ddp ddp(net, Group(std::make_shared<FakeTransport>(journal)));
    const auto hold = ddp.hold();
    square_loss(net, 0).backward();
    EXPECT_TRUE(journal.empty());
  });
}

// Parameters 0 and 1, 2, 3 in buckets; 4 in none.
const parallel::Assignment kBuckets = {{0, 1}, {2}, {3}};

TEST(BucketSchedule, BucketsAreDueInTheirOrder) {
  BucketSchedule schedule(5);
  schedule.begin(kBuckets);
  schedule.complete(2, 1);
  schedule.complete(1, 0);
  EXPECT_FALSE(schedule.is_due());
  schedule.complete(0, 0);
  EXPECT_TRUE(schedule.is_due());
  EXPECT_EQ(schedule.take(), 0);
  EXPECT_TRUE(schedule.is_due());
  EXPECT_EQ(schedule.take(), 1);
  EXPECT_THAT(schedule.order(), ElementsAre(2, 1, 0));
}

TEST(BucketSchedule, TheLastWaitsForTheEnd) {
  BucketSchedule schedule(5);
  schedule.begin(kBuckets);
  for (const size_t i : {0, 1}) schedule.complete(i, 0);
  schedule.complete(2, 1);
  schedule.complete(3, 2);
  EXPECT_FALSE(schedule.all_complete());
  schedule.complete(4, std::nullopt);
  EXPECT_TRUE(schedule.all_complete());
  while (schedule.is_due()) schedule.take();
  EXPECT_TRUE(schedule.has_next());
  EXPECT_EQ(schedule.take(), 2);
  EXPECT_FALSE(schedule.has_next());
}

TEST(BucketSchedule, APassBeginsAnew) {
  BucketSchedule schedule(5);
  schedule.begin(kBuckets);
  schedule.set(3, BucketSchedule::Step::Arriving);
  for (const size_t i : {0, 1}) schedule.complete(i, 0);
  schedule.take();
  schedule.begin(kBuckets);
  EXPECT_EQ(schedule.step(3), BucketSchedule::Step::Absent);
  EXPECT_FALSE(schedule.is_complete(0));
  EXPECT_FALSE(schedule.is_due());
  EXPECT_TRUE(schedule.order().empty());
  for (const size_t i : {0, 1}) schedule.complete(i, 0);
  EXPECT_EQ(schedule.take(), 0);
}

}  // namespace
}  // namespace lockstep::test
