#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <system_error>
#include <thread>

#include "comm/health/diagnosis.h"
#include "comm/health/peer_status.h"
#include "comm/host/interfaces.h"
#include "support/loopback.h"
#include "support/spawn.h"

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

// Its end closed the connections, which is all that this rank has seen.
TEST(Diagnosis, QuotesTheDeadlineOfARankInTheSameCall) {
  const Diagnosis diagnosis(0, {0, 1, 2}, std::make_shared<const LauncherStatus>());
  const Notice mine = notice(3, "barrier");
  Notice late = mine;
  late.state = Notice::State::Failed;
  late.reason = "timed out after 6 s";
  EXPECT_EQ(diagnosis.end(mine, "failed (Connection closed by peer)", {std::nullopt, late, mine}),
            mine.text +
                " failed (Connection closed by peer) on rank 0: rank 1 timed out after 6 s, 1 rank "
                "is in it, too");
  EXPECT_THAT(diagnosis.end(mine, late.reason, {std::nullopt, late, late}),
              testing::HasSubstr("all other ranks are in it, too"));
}

TEST(Diagnosis, TellsAStoreThatDoesNotAnswerFromARankThatDoesNot) {
  const Diagnosis diagnosis(1, {0, 1, 2}, std::make_shared<const LauncherStatus>());
  const Notice mine = notice(4, "all_reduce");
  EXPECT_THAT(
      diagnosis.end(mine, "timed out after 2 s", {mine, mine, std::nullopt}),
      testing::EndsWith("on rank 1: rank 2 did not answer: it is outside this group's calls, "
                        "or has ended, or cannot be reached, 1 rank is in it, too"));
  EXPECT_THAT(
      diagnosis.end(mine, "timed out after 2 s", {std::nullopt, std::nullopt, std::nullopt}),
      testing::EndsWith(
          "on rank 1: the ranks' store does not answer, so where the others are is not "
          "known: rank 0, which serves it, has ended or is stopped, or look at the network "
          "between the hosts"));
  const auto of = [&](int rank, const std::vector<int>& members) {
    const Diagnosis one(rank, members, std::make_shared<const LauncherStatus>());
    return one.end(mine, "timed out after 2 s", PeerStatus::Notices(members.size()));
  };
  EXPECT_THAT(of(0, {3, 4}), testing::HasSubstr("known: rank 0 of the world, which serves it"));
  // Rank 0 said of itself that it had ended.
  EXPECT_THAT(of(0, {0, 1}),
              testing::EndsWith("on rank 0: the ranks' store, which this rank serves, does not "
                                "answer it, so where the others are is not known: this machine is "
                                "overloaded, or the process may have no further thread"));
  test::isolated([&] {
    setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    EXPECT_THAT(of(0, {0, 1}), testing::HasSubstr("torchrun's agent, which serves it, has ended"));
  });
}

TEST(PeerStatus, GoesWithoutWhereTheSystemGivesNoThread) {
  test::isolated([] {
    using namespace std::chrono_literals;
    test::LoopbackSocket socket;
    const Store store = Store::connect({.host = "127.0.0.1",
                                        .port = socket.port,
                                        .server = true,
                                        .timeout = 60s,
                                        .listen_fd = socket.listen().fd.release()});
    PeerStatus status(store.clone(60s), 0, {0, 1});
    // The limit does not hold for root.
    if (geteuid() == 0) {
      ASSERT_EQ(setuid(65534), 0);
    }
    rlimit threads{};
    ASSERT_EQ(getrlimit(RLIMIT_NPROC, &threads), 0);
    const rlimit none{1, threads.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NPROC, &none), 0);
    ASSERT_THROW(std::thread([] {}).detach(), std::system_error);
    EXPECT_FALSE(status.peek());
    status.post(notice(1, "barrier"));
    EXPECT_EQ(status.exchange(notice(1, "barrier"), 0ms).size(), 2U);
    // Nor does that stay so.
    ASSERT_EQ(setrlimit(RLIMIT_NPROC, &threads), 0);
    status.post(notice(1, "barrier"));
    EXPECT_NE(store.get("lockstep/notice/0", 60s), "");
  });
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
