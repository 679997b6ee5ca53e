#include <gtest/gtest.h>

#include "comm/health/peer_status.h"
#include "comm/host/interfaces.h"

namespace lockstep::comm {
namespace {

Notice notice(uint64_t number, const std::string& signature) {
  return {.lane = "all", .number = number, .signature = signature, .text = "text of\n" + signature};
}

TEST(BoardNotice, ComesOutOfTheStoreAsItWentIn) {
  Notice in = notice(412, "all_reduce sum float32 x 4");
  in.state = Notice::State::Failed;
  in.reason = "timed out after 30 s";
  in.advice = "or look there";
  const auto out = Notice::unpacked(in.packed());
  ASSERT_TRUE(out);
  EXPECT_EQ(out->state, in.state);
  EXPECT_EQ(out->lane, in.lane);
  EXPECT_EQ(out->number, in.number);
  EXPECT_EQ(out->signature, in.signature);
  EXPECT_EQ(out->text, "text of all_reduce sum float32 x 4");
  EXPECT_EQ(out->reason, in.reason);
  EXPECT_EQ(out->advice, in.advice);
}

TEST(BoardNotice, GarbageIsNoNotice) {
  for (const char* text : {"", "x", "7\n1\n", "-1\n1\n", "1\n"})
    EXPECT_FALSE(Notice::unpacked(text)) << text;
}

TEST(BoardNotice, OnlyDifferentCallsAtTheSamePlaceContradict) {
  EXPECT_TRUE(notice(3, "barrier").contradicts(notice(3, "broadcast")));
  EXPECT_FALSE(notice(3, "barrier").contradicts(notice(3, "barrier")));
  EXPECT_FALSE(notice(3, "barrier").contradicts(notice(4, "broadcast")));
  Notice over = notice(3, "broadcast");
  over.state = Notice::State::Running;
  EXPECT_FALSE(notice(3, "barrier").contradicts(over));
}

TEST(NetAddress, FindsTheAddressTowardsAHostWithoutItsName) {
  EXPECT_EQ(address_towards("127.0.0.1", 29500), "127.0.0.1");
  EXPECT_FALSE(address_towards("no-such-host.invalid", 29500));
  EXPECT_TRUE(is_loopback("127.0.1.1"));
  EXPECT_TRUE(is_loopback("::1"));
  EXPECT_FALSE(is_loopback("10.0.0.1"));
}

}  // namespace
}  // namespace lockstep::comm
