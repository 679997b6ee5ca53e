// The shared-memory engine with ranks as threads of one process, where sanitizers see every access
// of every rank. The collectives of real processes are in tests/comm.
#include "comm/exchange.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>

#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};

std::unique_ptr<char, Free> shared_memory(int64_t bytes) {
  char* memory = static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  std::memset(memory, 0, bytes);
  return std::unique_ptr<char, Free>(memory);
}

// Runs `body` on `size` ranks that share memory, with `group_bytes` of group memory each.
void with_ranks(int size, int64_t group_bytes,
                const std::function<void(Exchange&, char* group_memory)>& body) {
  const auto memory = shared_memory(Exchange::bytes_for(size));
  const auto group = shared_memory(std::max<int64_t>(1, group_bytes * size));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      Exchange exchange(memory.get(), rank, size, 60s, false);
      exchange.set_group_memory([&](int64_t, int r) { return group.get() + r * group_bytes; });
      body(exchange, group.get() + rank * group_bytes);
    });
  }
  for (auto& rank : ranks) rank.join();
}

void name(Operation& operation, const char* what, int64_t count) {
  std::strcpy(operation.announcement.what, what);
  operation.announcement.count = count;
  operation.timeout = 60s;
}

void run(Exchange& exchange, const std::shared_ptr<Operation>& operation, const char* what,
         int64_t count) {
  name(*operation, what, count);
  exchange.start(operation);
  exchange.finish(operation);
}

template <class T>
Piece piece(std::vector<T>& values) {
  return {reinterpret_cast<char*>(values.data()), static_cast<int64_t>(values.size() * sizeof(T))};
}

constexpr Reduction kSum{Element::Int32, Combine::Sum};

class Engine : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Engine, testing::Values(1, 2, 3, 4, 7),
                         testing::PrintToStringParamName());

TEST_P(Engine, StagedCollectivesOfEverySize) {
  const int size = GetParam();
  with_ranks(size, 0, [&](Exchange& exchange, char*) {
    const int rank = exchange.rank();
    for (int64_t count : {1, 1000, 20000, 200001}) {
      std::vector<int32_t> sum(count, rank + 1);
      run(exchange, all_reduce(kSum, piece(sum)), "all_reduce", count);
      EXPECT_EQ(sum, std::vector<int32_t>(count, size * (size + 1) / 2));

      std::vector<int32_t> all(count * size), mine(count, rank);
      std::vector<Piece> parts;
      for (int r = 0; r < size; ++r) parts.push_back({piece(all).data + r * count * 4, count * 4});
      run(exchange, all_gather(parts, piece(mine)), "all_gather", count);
      for (int r = 0; r < size; ++r) EXPECT_EQ(all[r * count + count - 1], r);

      std::vector<int32_t> scattered(count);
      run(exchange, reduce_scatter(kSum, {piece(scattered)}, parts, {{0, exchange.size()}}),
          "reduce_scatter", count);
      EXPECT_EQ(scattered, std::vector<int32_t>(count, rank * size));

      std::vector<int32_t> dealt(count * size);
      std::vector<Piece> takes;
      for (int r = 0; r < size; ++r)
        takes.push_back({piece(dealt).data + r * count * 4, count * 4});
      run(exchange, all_to_all(takes, parts), "all_to_all", count);
      EXPECT_EQ(dealt, std::vector<int32_t>(count * size, rank));

      std::vector<int32_t> told(count, rank);
      run(exchange, broadcast(size - 1, rank, piece(told)), "broadcast", count);
      EXPECT_EQ(told, std::vector<int32_t>(count, size - 1));
    }
    run(exchange, barrier(), "barrier", 0);
  });
}

TEST_P(Engine, GroupMemoryIsReducedInPlaceWhileOthersAreInFlight) {
  constexpr int64_t kCount = 10000, kBuckets = 5;
  const int size = GetParam();
  with_ranks(size, kBuckets * kCount * 4, [&](Exchange& exchange, char* memory) {
    auto* data = reinterpret_cast<int32_t*>(memory);
    for (int step = 1; step <= 20; ++step) {
      std::vector<std::shared_ptr<Operation>> works;
      std::vector<int32_t> between(100, exchange.rank());
      for (int64_t bucket = 0; bucket < kBuckets; ++bucket) {
        int32_t* part = data + bucket * kCount;
        std::fill(part, part + kCount, step * (exchange.rank() + 1));
        works.push_back(all_reduce(kSum, {reinterpret_cast<char*>(part), kCount * 4}));
        name(*works.back(), "bucket", kCount);
        works.back()->announcement.segment = 0;
        works.back()->announcement.offset = bucket * kCount * 4;
        exchange.start(works.back());
        exchange.advance(*works.front());
        if (bucket == 2) run(exchange, all_reduce(kSum, piece(between)), "between", 100);
      }
      for (const auto& work : works) exchange.finish(work);
      EXPECT_EQ(between[99], size * (size - 1) / 2);
      for (int64_t i = 0; i < kBuckets * kCount; ++i)
        ASSERT_EQ(data[i], step * size * (size + 1) / 2);
    }
  });
}

TEST_P(Engine, MessagesCrossEachOther) {
  const int size = GetParam();
  with_ranks(size, 0, [&](Exchange& exchange, char*) {
    const int rank = exchange.rank();
    for (int64_t count : {0, 3, 50000}) {
      std::vector<std::vector<int32_t>> out(size, std::vector<int32_t>(count, rank)),
          in(size, std::vector<int32_t>(count));
      std::vector<std::shared_ptr<Parcel>> parcels;
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        for (const bool sending : {true, false}) {
          auto parcel = std::make_shared<Parcel>();
          const Piece data = piece(sending ? out[peer] : in[peer]);
          *parcel = {.sending = sending,
                     .peer = peer,
                     .dtype = "int32",
                     .count = count,
                     .bytes = data.bytes,
                     .data = data.data,
                     .timeout = 60s};
          exchange.mailbox().start(parcel);
          parcels.push_back(parcel);
        }
      }
      for (const auto& parcel : parcels) exchange.mailbox().finish(parcel);
      for (int peer = 0; peer < size; ++peer) {
        if (peer != rank) {
          EXPECT_EQ(in[peer], std::vector<int32_t>(count, peer));
        }
      }
    }
  });
}

TEST_P(Engine, RanksThatDisagreeAllKnow) {
  const int size = GetParam();
  if (size == 1) return;  // nobody to disagree with
  std::atomic<int> told = 0;
  with_ranks(size, 0, [&](Exchange& exchange, char*) {
    std::vector<int32_t> data(exchange.rank() == 0 ? 10 : 11);
    try {
      run(exchange, all_reduce(kSum, piece(data)), "all_reduce", static_cast<int64_t>(data.size()));
    } catch (const CommError& error) {
      told += std::string(error.what()).find("disagree") != std::string::npos ||
              std::string(error.what()).find("gave up") != std::string::npos;
    }
  });
  EXPECT_EQ(told, size);
}

}  // namespace
}  // namespace lockstep::comm
