// The shared-memory engine with ranks as threads of one process, where sanitizers see every access
// of every rank. The collectives of real processes are in tests/comm.
#include "comm/shm/exchange.h"

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>

#include "lockstep/core/error.h"
#include "support/thrown.h"

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
                const std::function<void(Exchange&, char* group_memory)>& body,
                const std::vector<int>& numa_nodes = {}) {
  const auto memory = shared_memory(Exchange::bytes_for(size));
  const auto group = shared_memory(std::max<int64_t>(1, group_bytes * size));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      Exchange exchange(memory.get(), rank, size, 60s, nullptr, {}, {}, {},
                        numa_nodes.empty() ? -1 : numa_nodes[rank]);
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

std::shared_ptr<Message> make_message(std::vector<int32_t>& values, int peer, bool sending) {
  auto message = std::make_shared<Message>();
  *message = {.sending = sending,
              .peer = peer,
              .dtype = "int32",
              .count = static_cast<int64_t>(values.size()),
              .bytes = piece(values).bytes,
              .data = piece(values).data,
              .timeout = 60s};
  return message;
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

// More pieces than a sender has large slots for, to ranks that receive only when the last one has.
TEST(ManyRanks, MessagesToRanksThatDoNotReceiveYet) {
  constexpr int kSize = 13, kCount = 60000;
  with_ranks(kSize, 0, [&](Exchange& exchange, char*) {
    const int rank = exchange.rank();
    std::vector<int32_t> text(kCount), word(1);
    std::iota(text.begin(), text.end(), 0);
    if (rank == 0) {
      std::vector<std::shared_ptr<Message>> messages;
      for (int peer = 1; peer < kSize; ++peer) {
        messages.push_back(make_message(text, peer, true));
        exchange.start(messages.back());
      }
      for (const auto& message : messages) exchange.finish(message);
      return;
    }
    const auto pass = [&](std::vector<int32_t>& values, int peer, bool sending) {
      const auto message = make_message(values, peer, sending);
      exchange.start(message);
      exchange.finish(message);
    };
    std::vector<int32_t> got(kCount);
    if (rank + 1 < kSize) pass(word, rank + 1, false);
    pass(got, 0, false);
    EXPECT_EQ(got, text);
    if (rank > 1) pass(word, rank - 1, true);
  });
}

TEST(ManyRanks, SharedMemoryGrowsSlowlyWithTheRanks) {
  EXPECT_LT(Exchange::bytes_for(2), 2 << 20);
  EXPECT_LT(Exchange::bytes_for(8), 10 << 20);
  EXPECT_LT(Exchange::bytes_for(128), 170 << 20);
}

// Counters of operations and meetings have 32 bits.
TEST_P(Engine, CountersMayWrap) {
  constexpr uint32_t kBefore = 20, kCount = 40;
  const int size = GetParam();
  const auto memory = shared_memory(Exchange::bytes_for(size));
  auto* const blocks = reinterpret_cast<RankBlock*>(memory.get());
  for (int r = 0; r < size; ++r) {
    for (Counter* counter : {&blocks[r].posted, &blocks[r].phase, &blocks[r].done})
      counter->value = -kBefore;
  }
  const auto group = shared_memory(std::max<int64_t>(1, size) * 4096);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      Exchange exchange(memory.get(), rank, size, 60s, nullptr);
      exchange.set_group_memory([&](int64_t, int r) { return group.get() + r * 4096; });
      auto* const own = reinterpret_cast<int32_t*>(group.get() + rank * 4096);
      std::vector<std::shared_ptr<Operation>> in_place;
      for (uint32_t i = 0; i < 2 * kBefore; ++i) {
        own[16 * i] = rank + 1;
        in_place.push_back(all_reduce(kSum, {reinterpret_cast<char*>(own + 16 * i), 4}));
        in_place.back()->announcement.segment = 0;
        in_place.back()->announcement.offset = 64 * i;
        name(*in_place.back(), "all_reduce", 1);
        exchange.start(in_place.back());
      }
      for (const auto& operation : in_place) exchange.finish(operation);
      for (uint32_t i = 0; i < 2 * kBefore; ++i) EXPECT_EQ(own[16 * i], size * (size + 1) / 2);
      for (uint32_t i = 0; i < kCount; ++i) {
        std::vector<int32_t> sum(1 + i % 4 * 20000, rank + 1);
        run(exchange, all_reduce(kSum, piece(sum)), "all_reduce", static_cast<int64_t>(sum.size()));
        EXPECT_EQ(sum.back(), size * (size + 1) / 2);
      }
    });
  }
  for (auto& rank : ranks) rank.join();
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
        exchange.advance(works.front());
        if (bucket == 2) run(exchange, all_reduce(kSum, piece(between)), "between", 100);
      }
      for (const auto& work : works) exchange.finish(work);
      EXPECT_EQ(between[99], size * (size - 1) / 2);
      for (int64_t i = 0; i < kBuckets * kCount; ++i)
        ASSERT_EQ(data[i], step * size * (size + 1) / 2);
    }
  });
}

class OverNumaNodes : public testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(Ranks, OverNumaNodes,
                         testing::Values(std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1},
                                         std::vector<int>{0, 0, 0, 0, 1, 1, 1}));

// In steps and in others, in group memory and through slots, one after another and at once.
TEST_P(OverNumaNodes, SumsAreTakenWhileOthersAreInFlight) {
  constexpr int64_t kCount = 70'000, kPart = 70'001;  // two chunks of a slot
  const int size = static_cast<int>(GetParam().size());
  const auto body = [&](Exchange& exchange, char* memory) {
    EXPECT_TRUE(exchange.numa_nodes().help_all_reduce());
    EXPECT_TRUE(exchange.numa_nodes().help_reduce_scatter());
    const int rank = exchange.rank(), sum = size * (size + 1) / 2;
    auto* const data = reinterpret_cast<int32_t*>(memory);
    const auto in_place = [&](std::shared_ptr<Operation> operation, int64_t begin) {
      name(*operation, "in place", kCount);
      operation->announcement.segment = 0;
      operation->announcement.offset = begin * 4;
      exchange.start(operation);
      return operation;
    };
    for (int step = 1; step <= 6; ++step) {
      std::fill(data, data + 2 * kCount + size * kPart, step * (rank + 1));
      std::vector<int32_t> between(100'000, rank + 1), scattered(kPart);
      std::vector<Piece> inputs;
      for (int r = 0; r < size; ++r)
        inputs.push_back({memory + (2 * kCount + r * kPart) * 4, kPart * 4});
      if (step % 3 == 0) scattered.clear();  // into the input itself
      const Piece output = step % 3 == 0 ? inputs[rank] : piece(scattered);
      std::vector<std::shared_ptr<Operation>> works;
      works.push_back(in_place(all_reduce(kSum, {memory, kCount * 4}), 0));
      works.push_back(in_place(reduce_scatter(kSum, {output}, inputs, {{0, size}}), 2 * kCount));
      if (step % 2 == 0) {
        works.push_back(all_reduce(kSum, piece(between)));
        name(*works.back(), "between", 100'000);
        exchange.start(works.back());
      }
      works.push_back(in_place(all_reduce(kSum, {memory + kCount * 4, kCount * 4}), kCount));
      if (step > 3) {
        while (!exchange.advance(works.back())) std::this_thread::yield();
      }
      for (const auto& work : works) exchange.finish(work);
      EXPECT_EQ(between.back(), step % 2 == 0 ? sum : rank + 1);
      const auto* taken = reinterpret_cast<const int32_t*>(output.data);
      EXPECT_EQ(std::vector<int32_t>(taken, taken + kPart),
                std::vector<int32_t>(kPart, step * sum));
      EXPECT_EQ(std::vector<int32_t>(data, data + 2 * kCount),
                std::vector<int32_t>(2 * kCount, step * sum));
    }
  };
  with_ranks(size, (2 * kCount + size * kPart + 16) * 4, body, GetParam());
}

TEST_P(Engine, MessagesCrossEachOther) {
  const int size = GetParam();
  with_ranks(size, 0, [&](Exchange& exchange, char*) {
    const int rank = exchange.rank();
    for (int64_t count : {0, 3, 50000}) {
      std::vector<std::vector<int32_t>> out(size, std::vector<int32_t>(count, rank)),
          in(size, std::vector<int32_t>(count));
      std::vector<std::shared_ptr<Message>> messages;
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        for (const bool sending : {true, false}) {
          messages.push_back(make_message(sending ? out[peer] : in[peer], peer, sending));
          exchange.start(messages.back());
        }
      }
      for (const auto& message : messages) exchange.finish(message);
      for (int peer = 0; peer < size; ++peer) {
        if (peer != rank) {
          EXPECT_EQ(in[peer], std::vector<int32_t>(count, peer));
        }
      }
    }
  });
}

// Each rank waits first for what the other one needs last.
TEST(EngineOrder, WhoWaitsForAMessageMovesCollectivesOn) {
  for (const int64_t count : {100, 1000000}) {
    with_ranks(2, 0, [&](Exchange& exchange, char*) {
      std::vector<int32_t> sum(count, 1), told(count, exchange.rank()),
          text(count, exchange.rank());
      const auto first = all_reduce(kSum, piece(sum)),
                 second = broadcast(1, exchange.rank(), piece(told));
      for (const auto& operation : {first, second}) {
        name(*operation, "collective", count);
        exchange.start(operation);
      }
      const auto message = make_message(text, 1 - exchange.rank(), exchange.rank() == 1);
      if (exchange.rank() == 0) {
        exchange.start(message);
        exchange.finish(message);
      }
      exchange.finish(second);
      exchange.finish(first);
      if (exchange.rank() == 1) {
        exchange.start(message);
        exchange.finish(message);
      }
      EXPECT_EQ(sum, std::vector<int32_t>(count, 2));
      EXPECT_EQ(told, std::vector<int32_t>(count, 1));
      EXPECT_EQ(text, std::vector<int32_t>(count, 1));
    });
  }
}

// Asking takes a collective of many meetings to its end, and never waits for a rank that is
// somewhere else.
TEST_P(Engine, AskingIsEnough) {
  const int size = GetParam();
  std::atomic<int> over = 0;
  with_ranks(size, 0, [&](Exchange& exchange, char*) {
    std::vector<int32_t> sum(1000000, 1);
    const auto operation = all_reduce(kSum, piece(sum));
    name(*operation, "all_reduce", 1000000);
    exchange.start(operation);
    while (!exchange.advance(operation)) std::this_thread::yield();
    EXPECT_EQ(sum, std::vector<int32_t>(1000000, size));
    // Rank 0 leaves the others alone in an operation that it comes to only when they have asked.
    const auto late = barrier();
    name(*late, "barrier", 0);
    if (exchange.rank() != 0) {
      exchange.start(late);
      EXPECT_FALSE(exchange.advance(late));
      ++over;
    }
    while (over < size - 1) std::this_thread::yield();
    if (exchange.rank() == 0) exchange.start(late);
    exchange.finish(late);
  });
}

TEST(EngineOrder, AWaitThatIsCutShortGoesOnLater) {
  std::atomic<int> turn = 0;
  with_ranks(2, 0, [&](Exchange& exchange, char*) {
    std::vector<int32_t> sum(10, 1);
    const auto operation = all_reduce(kSum, piece(sum));
    name(*operation, "all_reduce", 10);
    if (exchange.rank() == 0) {
      exchange.start(operation);
      EXPECT_FALSE(exchange.finish(operation, Exchange::Clock::now() + 3ms));
      turn = 1;
    } else {
      while (turn == 0) std::this_thread::yield();
      exchange.start(operation);
    }
    EXPECT_TRUE(exchange.finish(operation));
    EXPECT_EQ(sum, std::vector<int32_t>(10, 2));
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
              std::string(error.what()).find("aborted") != std::string::npos;
    }
  });
  EXPECT_EQ(told, size);
}

// As a member of a new group does that ends after all have agreed to make it.
TEST(EngineStart, APeerThatEndsBeforeItComesIsNoticed) {
  const auto memory = shared_memory(Exchange::bytes_for(2));
  const pid_t child = fork();
  if (child == 0) _exit(0);
  EXPECT_THAT(test::message_of<CommError>([&] {
                const Exchange exchange(memory.get(), 0, 2, 60s,
                                        std::make_shared<const LauncherStatus>(), {}, {},
                                        {nullptr, Process::watch(child)});
              }),
              testing::HasSubstr("rank 1 (process " + std::to_string(child) + ") has ended"));
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

}  // namespace
}  // namespace lockstep::comm
