// What grows with the number of ranks, by counting: requests to the store, bytes on the wire.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <numeric>
#include <optional>
#include <thread>

#include "comm/direct/job.h"
#include "comm/health/peer_status.h"
#include "comm/hierarchical/transport.h"
#include "comm/shm/transport.h"
#include "comm/world/rendezvous.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"
#include "support/loopback.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;

// Enough to show how it grows; docs/log.md has 1,024.
const int kMany = static_cast<int>(env_int("LOCKSTEP_SCALE_RANKS", 2, 4096).value_or(128));

Store served_alone() {
  test::LoopbackSocket socket;
  return Store::connect({.host = "127.0.0.1",
                         .port = socket.port,
                         .server = true,
                         .timeout = 60s,
                         .listen_fd = socket.listen().fd.release()});
}

// Runs `body` for each of `count` pretended ranks, with connections of their own, all at once;
// returns the requests that the store has answered.
uint64_t requests_of(int count, const std::function<void(const Store&, int rank)>& body) {
  const Store store = served_alone();
  std::vector<Store> stores;
  for (int rank = 0; rank < count; ++rank) stores.push_back(store.clone(60s));
  const uint64_t before = store.requests();
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < count; ++rank)
    ranks.emplace_back([&, rank] { body(stores[rank], rank); });
  for (std::thread& rank : ranks) rank.join();
  const uint64_t requests = store.requests() - before;
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  fmt::print("{} ranks: {} requests in {:.2f} s\n", count, requests, taken.count());
  std::fflush(stdout);
  return requests;
}

TEST(Scale, ARankMeetsTheOthersWithAFewRequests) {
  test::isolated([] {
    for (const int size : {2, 16, kMany}) {
      const uint64_t requests = requests_of(size, [&](const Store& store, int rank) {
        const auto members = exchange_members(store, rank, this_member(size, rank, {}), 60s);
        ASSERT_EQ(members.size(), static_cast<size_t>(size));
        for (int r = 0; r < size; ++r) EXPECT_EQ(members[r].local_rank, r);
      });
      EXPECT_LE(requests, static_cast<uint64_t>(10 * size)) << size;
    }
  });
}

TEST(Scale, RanksThatDisagreeAreAllToldWhateverTheirNumber) {
  test::isolated([] {
    constexpr int kSize = 16;
    requests_of(kSize, [&](const Store& store, int rank) {
      const int believed = rank == 5 ? kSize + 1 : kSize;
      EXPECT_THROW(exchange_members(store, rank, this_member(believed, rank, {}), 60s),
                   ConfigError);
    });
  });
}

// As all that wait in a collective for a slow rank do each second.
TEST(Scale, ARankThatWaitsLongAsksAFewQuestions) {
  test::isolated([] {
    for (const int size : {2, kMany}) {
      std::vector<int> members(size);
      std::iota(members.begin(), members.end(), 0);
      std::vector<std::optional<PeerStatus>> boards(size);
      const Notice notice{.lane = "all", .number = 7, .signature = "all_reduce", .text = "it"};
      const uint64_t requests = requests_of(size, [&](const Store& store, int rank) {
        boards[rank].emplace(store, rank, members);
        for (const auto& other : boards[rank]->exchange(notice, 0ms))
          EXPECT_FALSE(other && other->contradicts(notice));
      });
      EXPECT_LE(requests, static_cast<uint64_t>(8 * size)) << size;
    }
  });
}

TEST(Scale, DifferentCallsAreNoticedByTheLastThatLooks) {
  test::isolated([] {
    const Store store = served_alone();
    Notice notice{.lane = "all", .number = 7, .signature = "all_reduce", .text = "it"};
    PeerStatus first(store.clone(60s), 0, {0, 1, 2}), second(store.clone(60s), 1, {0, 1, 2});
    const auto contradicted = [](PeerStatus& peer_status, const Notice& mine) {
      for (const auto& other : peer_status.exchange(mine, 0ms)) {
        if (other && other->contradicts(mine)) return true;
      }
      return false;
    };
    EXPECT_FALSE(contradicted(first, notice));
    EXPECT_FALSE(contradicted(first, notice));
    Notice other = notice;
    other.signature = "broadcast";
    EXPECT_TRUE(contradicted(second, other));
    // A later call that has the old one's place.
    other.number = notice.number = 71;
    EXPECT_FALSE(contradicted(second, other));
    EXPECT_TRUE(contradicted(first, notice));
  });
}

int64_t sent_by_one(int64_t bytes, int size) {
  const at::Tensor tensor = at::zeros({bytes}, at::kByte);
  const DirectJob job =
      direct_job({.what = Collective::AllReduce, .outputs = {tensor}}, 0, size, size);
  int64_t sent = 0;
  for (int r = 1; r < size; ++r) sent += job.call.bytes[r];
  return sent + job.call.bytes[0] * static_cast<int64_t>(job.call.takers.size());
}

TEST(Scale, SmallReductionsOverTheNetworkSendLittle) {
  test::isolated([] {
    EXPECT_EQ(sent_by_one(16 << 10, 4), 3 * (16 << 10));
    EXPECT_LT(sent_by_one(16 << 10, 1000), 4 * (16 << 10));
    EXPECT_EQ(sent_by_one(4, 1000), 999 * 4);
  });
}

TEST(Scale, PiecesAreDividedIntoSlicesThatAreWorthAMessage) {
  EXPECT_EQ(chunk_bytes(2, 2), 1 << 20);
  EXPECT_EQ(chunk_bytes(8, 4), 1 << 20);
  for (const int hosts : {64, 1000}) EXPECT_GE(chunk_bytes(8, hosts) / 8 / hosts, 16 << 10);
}

// The slots of shared memory have no part for so many.
TEST(Scale, MoreRanksOfAHostThanShareMemoryAreRefused) {
  test::isolated([] {
    const Store store = served_alone();
    EXPECT_THAT(test::message_of<ConfigError>(
                    [&] { (void)make_shm_transport(store, 1, 2049, {.timeout = 50ms}); }),
                testing::HasSubstr("[shm] 2049 ranks on one host: 2048 at most"));
  });
}

}  // namespace
}  // namespace lockstep::comm
