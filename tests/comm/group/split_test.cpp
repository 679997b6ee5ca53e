// Groups of some ranks, made while the others do something else.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using test::message_of;
using test::name_of;
using test::Ranks;
using test::spawn;
using testing::HasSubstr;

class Split : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(On, Split,
                         testing::Values(Ranks{"shm", 3}, Ranks{"tcp", 3}, Ranks{"gloo", 3},
                                         Ranks{"auto", 4, {0, 0, 1, 1}}),
                         name_of);

// Rank 0 gets more bytes than it makes room for.
TEST_P(Split, OfOneRankWhereTheOthersExchangeBytes) {
  spawn(GetParam(), [](World& world) {
    const Group group = world.group().split(0);
    EXPECT_THAT(message_of<CommError>([&] {
                  if (group.rank() == 0) (void)group.split(0);
                  (void)group.all_gather_bytes(std::string(4000, 'x'));
                  group.barrier().wait();
                }),
                HasSubstr("the ranks disagree: rank 0 calls split, rank 1 another call"));
    world.group().barrier().wait();
  });
}

// As many bytes as it makes room for.
TEST_P(Split, OfOneRankWhereTheOthersExchangeAsManyBytes) {
  spawn(GetParam(), [](World& world) {
    for (const int count : {8, 16}) {
      const Group group = world.group().split(0);
      EXPECT_THAT(message_of<CommError>([&] {
                    if (group.rank() == 0) (void)group.split(0);
                    (void)group.all_gather_bytes(std::string(count, 'x'));
                    group.barrier().wait();
                  }),
                  HasSubstr("the ranks disagree: rank 0 calls split, rank 1 another call"));
      world.group().barrier().wait();
    }
  });
}

TEST_P(Split, OfOneRankWhereTheOthersMakeASubgroup) {
  spawn(GetParam(), [](World& world) {
    const Group group = world.group().split(0);
    EXPECT_THAT(message_of<CommError>([&] {
                  (void)(group.rank() == 0 ? group.split(0) : group.subgroup({0, 1}));
                }),
                HasSubstr("the ranks disagree: rank "));
    world.group().barrier().wait();
  });
}

TEST_P(Split, AgainAfterOneRankCouldNotBegin) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    if (group.rank() == 0) {
      static_cast<void>(then(Work(), []() -> Work { throw std::runtime_error("its own"); }));
      EXPECT_THROW((void)group.split(0), std::runtime_error);
    }
    group.split(0).barrier().wait();
  });
}

// One that is received or sent before, but sent or received after.
TEST_P(Split, WhileMessagesAreUnderWay) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    for (const int64_t count : {2, 100000}) {
      at::Tensor data = at::full({count}, static_cast<float>(group.rank()));
      std::vector<Group> parts;
      if (group.rank() == 1) {
        Work received = group.recv(data, 0);
        parts.push_back(group.split(0));
        received.wait();
        EXPECT_EQ(data[count - 1].item<float>(), 0);
        Work sent = group.send(data.fill_(7), 0);
        parts.push_back(group.split(0));
        sent.wait();
      } else {
        parts.push_back(group.split(0));
        if (group.rank() == 0) group.send(data, 1).wait();
        parts.push_back(group.split(0));
        if (group.rank() == 0) {
          group.recv(data, 1).wait();
          EXPECT_EQ(data[0].item<float>(), 7);
        }
      }
      for (const Group& part : parts) part.barrier().wait();
    }
  });
}

}  // namespace
}  // namespace lockstep::comm
