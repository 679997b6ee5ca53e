// The key-value store's server and client, without libtorch: sanitizers see all of both.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <atomic>
#include <future>
#include <optional>
#include <thread>

#include "comm/store/client.h"
#include "comm/store/server.h"
#include "comm/store/values.h"
#include "engine/deadline.h"
#include "lockstep/core/error.h"
#include "support/fork.h"
#include "support/loopback.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using test::message_of;
using testing::ElementsAre;
using testing::HasSubstr;

class StoreEngine : public testing::Test {
 protected:
  StoreEngine() {
    test::LoopbackSocket socket;
    port_ = socket.port;
    server_.emplace(std::move(socket.listen().fd));
  }
  StoreClient client(StoreClient::Heed heed = {}) const {
    return StoreClient("127.0.0.1", port_, in(10s), std::move(heed));
  }

  int port_ = 0;
  std::optional<StoreServer> server_;
};

TEST_F(StoreEngine, EveryThreadsAdditionCounts) {
  constexpr int kThreads = 6, kTimes = 100;
  StoreClient shared = client();
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      // Every second one over a connection of its own.
      std::optional<StoreClient> own;
      if (i % 2 == 0) own.emplace("127.0.0.1", port_, in(10s));
      for (int k = 0; k < kTimes; ++k) (own ? *own : shared).add("sum", 1, in(10s));
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(shared.add("sum", 0, in(1s)), kThreads * kTimes);
}

// As when rank 0 ends while others still make a group.
TEST_F(StoreEngine, ItsEndWaitsForThoseWhoMakeAGroup) {
  StoreClient rank = client();
  rank.add(kMaking, 2, in(10s));
  std::atomic<bool> over = false;
  std::thread end([&] {
    server_.reset();
    over = true;
  });
  const auto until = std::chrono::steady_clock::now() + 200ms;
  do {
    rank.add("sum", 1, in(10s));
  } while (!over && std::chrono::steady_clock::now() < until);
  EXPECT_EQ(client().add(kMaking, -1, in(10s)), 1);  // who comes late is served, too
  EXPECT_FALSE(over);
  EXPECT_EQ(rank.add(kMaking, -1, in(10s)), 0);
  end.join();
  EXPECT_THAT(message_of<StoreFailure>([&] { rank.add("sum", 1, in(10s)); }), HasSubstr("ended"));
}

TEST_F(StoreEngine, ItsEndWaitsForNobodyOnceTheJobIsOver) {
  test::LoopbackSocket socket;
  std::optional<StoreServer> server(std::in_place, std::move(socket.listen().fd), std::nullopt,
                                    [] { return true; });
  StoreClient("127.0.0.1", socket.port, in(10s)).add(kMaking, 1, in(10s));
  const auto start = std::chrono::steady_clock::now();
  server.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - start, StoreServer::kLinger);
}

// While it lives, no descriptor can be opened.
struct NoDescriptors {
  NoDescriptors() {
    getrlimit(RLIMIT_NOFILE, &before);
    rlimit none = before;
    none.rlim_cur = 0;
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptors() { setrlimit(RLIMIT_NOFILE, &before); }
  rlimit before{};
};

TEST_F(StoreEngine, AServerWithoutDescriptorsSaysSo) {
  test::in_a_child([] {
    test::LoopbackSocket socket;
    // UndefinedBehaviorSanitizer opens a pipe to look at what is thrown.
    EXPECT_THAT(message_of<CommError>([&] {
                  const NoDescriptors left;
                  StoreServer serves(std::move(socket.listen().fd));
                }),
                HasSubstr("Too many open files; no descriptor is left: raise `ulimit -n`"));
  });
}

TEST_F(StoreEngine, AWaitEndsWhenTheLastKeyIsThere) {
  std::atomic<bool> over = false;
  std::thread waits([&] {
    client().wait({"a", "b", "c"}, in(10s));
    over = true;
  });
  StoreClient other = client();
  other.set("a", "1", in(1s));
  other.add("b", 1, in(1s));
  EXPECT_FALSE(other.check({"a", "b", "c"}, in(1s)));
  EXPECT_FALSE(over);
  other.append("c", "2", in(1s));
  waits.join();
  EXPECT_THAT(other.get({"a", "b", "c"}, in(1s)), ElementsAre("1", "1", "2"));
}

TEST_F(StoreEngine, AWaitThatEndsAtItsDeadlineLeavesTheConnectionInStep) {
  StoreClient one = client();
  for (int i = 0; i < 20; ++i) {
    EXPECT_THAT(message_of<StoreFailure>([&] { one.wait({"absent"}, in(5ms)); }),
                HasSubstr("no rank has set it"));
    EXPECT_EQ(one.add("count", 1, in(1s)), i + 1);
  }
}

// The answer and the end of the wait cross on their way: whichever is first, the next call is
// right.
TEST_F(StoreEngine, AKeyThatComesAtTheDeadlineIsEitherWay) {
  StoreClient waits = client();
  StoreClient sets = client();
  for (int i = 0; i < 50; ++i) {
    const std::string key = "key" + std::to_string(i);
    std::thread setter([&] { sets.set(key, "x", in(1s)); });
    try {
      waits.wait({key}, in(0ms));
    } catch (const StoreFailure&) {
    }
    setter.join();
    EXPECT_EQ(waits.add("count", 1, in(1s)), i + 1);
  }
}

// In 30 s nothing would come: who hears that it is in vain waits no longer, and goes on with it.
TEST_F(StoreEngine, AWaitInVainEndsAndTheConnectionStays) {
  std::atomic<bool> over{false};
  StoreClient waits = client([&]() -> std::optional<std::string> {
    if (!over) return std::nullopt;
    return "was aborted (host2 was lost)";
  });
  StoreClient other = client();
  std::thread tells([&] {
    other.wait({"waiting"}, in(10s));
    over = true;
  });
  waits.set("waiting", "", in(10s));
  const auto start = StoreClient::Clock::now();
  EXPECT_EQ(message_of<StoreGivenUp>([&] { waits.wait({"absent"}, in(30s)); }),
            "was aborted (host2 was lost)");
  EXPECT_LT(StoreClient::Clock::now() - start, 10s);
  tells.join();
  waits.set("said", "at last", in(10s));
  EXPECT_EQ(other.get({"said"}, in(10s)), std::vector<std::string>{"at last"});
}

// As where two consumers wait for one key, and the first to get it removes it.
TEST_F(StoreEngine, AKeyThatIsRemovedAfterAWaitIsWaitedForAgain) {
  StoreClient gets = client(), other = client();
  const uint64_t before = server_->requests();
  auto values = std::async(std::launch::async, [&] {
    return gets.get({"here", "again"}, in(60s));
  });
  while (server_->requests() == before) std::this_thread::yield();
  other.set("here", "1", in(10s));
  other.set("again", "2", in(10s));
  EXPECT_THAT(values.get(), ElementsAre("1", "2"));
  // A queue has no value.
  EXPECT_THAT(message_of<StoreFailure>([&] {
                const Fd fd = test::connection_to(port_);
                const std::string push =
                    StoreMessage(StoreQuery::Validate).number(kMagic).bytes() +
                    StoreMessage(StoreQuery::Push).text("queue").text("1").bytes();
                EXPECT_GT(send(fd.get(), push.data(), push.size(), MSG_NOSIGNAL), 0);
                other.wait({"queue"}, in(60s));
                gets.get({"queue"}, in(20ms));
              }),
              HasSubstr("no answer"));
  EXPECT_EQ(gets.add("count", 1, in(60s)), 1);
}

// A program that rank 0 starts, and that goes on after its end.
TEST_F(StoreEngine, ThePortIsNotHeldByOtherPrograms) {
  test::LoopbackSocket socket;
  const int fd = socket.listen().fd.get();
  ASSERT_EQ(fcntl(fd, F_SETFD, 0), 0);  // as the launcher hands it over
  const StoreServer serves(std::move(socket.fd));
  EXPECT_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
}

void expect_not_awaited_in_vain(int port) {
  const auto start = StoreClient::Clock::now();
  EXPECT_EQ(message_of<StoreGivenUp>(
                [&] { StoreClient("127.0.0.1", port, in(30s), [] { return "was aborted"; }); }),
            "was aborted");
  EXPECT_LT(StoreClient::Clock::now() - start, 10s);
}

TEST_F(StoreEngine, WhoeverIsSilentIsNotAwaitedInVain) {
  test::LoopbackSocket silent;
  expect_not_awaited_in_vain(silent.listen().port);
}

// Nobody listens there yet.
TEST_F(StoreEngine, TriesInVainEnd) { expect_not_awaited_in_vain(test::LoopbackSocket().port); }

TEST_F(StoreEngine, CompareAndSetEraseAndCount) {
  StoreClient one = client();
  EXPECT_EQ(one.compare_set("k", "other", "x", in(1s)), "other");
  EXPECT_FALSE(one.check({"k"}, in(1s)));
  EXPECT_EQ(one.compare_set("k", "", "x", in(1s)), "x");
  EXPECT_EQ(one.compare_set("k", "y", "z", in(1s)), "x");
  EXPECT_EQ(one.compare_set("k", "x", "z", in(1s)), "z");
  EXPECT_EQ(one.count_keys(in(1s)), 1);
  EXPECT_TRUE(one.erase("k", in(1s)));
  EXPECT_FALSE(one.erase("k", in(1s)));
  one.set("text", "no number", in(1s));
  EXPECT_EQ(message_of<StoreRefusal>([&] { one.add("text", 4, in(1s)); }),
            "its value is not a number");
  EXPECT_EQ(one.get({"text"}, in(1s)).front(), "no number");
  const std::string lowest = std::to_string(kNoNumber);
  one.set("lowest", lowest, in(1s));
  EXPECT_EQ(one.add("lowest", 0, in(1s)), kNoNumber);
}

TEST_F(StoreEngine, AFullStoreRefusesAndServesOn) {
  StoreClient one = client();
  const std::string large(StoreValues::kMost / 5, 'v');
  for (const char* key : {"a", "b", "c", "d"}) one.set_confirmed(key, large, in(30s));
  EXPECT_THAT(message_of<StoreRefusal>([&] { one.set_confirmed("e", large, in(30s)); }),
              HasSubstr("256 MiB"));
  EXPECT_FALSE(one.check({"e"}, in(1s)));
  one.set_confirmed("short", "value", in(1s));
  EXPECT_TRUE(one.erase("a", in(1s)));
  one.set_confirmed("e", large, in(30s));
}

TEST_F(StoreEngine, AValueThatNobodyTakesIsAnError) {
  StoreClient one = client();
  server_.reset();
  EXPECT_THAT(message_of<StoreFailure>([&] { one.set_confirmed("k", "v", in(30s)); }),
              HasSubstr("has ended"));
  // Nor is a server that has ended waited for.
  const auto start = StoreClient::Clock::now();
  EXPECT_THAT(message_of<StoreFailure>(
                  [&] { StoreClient("127.0.0.1", port_, in(60s), {}, std::nullopt, true); }),
              HasSubstr("has ended"));
  EXPECT_LT(StoreClient::Clock::now() - start, 30s);
}

TEST_F(StoreEngine, ValuesOfEverySize) {
  StoreClient one = client();
  for (const size_t size : {0, 1, 1440, 70'000, 5'000'000}) {
    const std::string value(size, 'v');
    one.set("value", value, in(10s));
    EXPECT_EQ(one.get({"value"}, in(10s)).front(), value) << size;
  }
}

TEST_F(StoreEngine, TheServersEndEndsAWait) {
  StoreClient waits = client();
  std::thread ends([&] {
    client().set("from", "another", in(1s));
    server_.reset();
  });
  EXPECT_THAT(message_of<StoreFailure>([&] { waits.wait({"absent"}, in(30s)); }),
              HasSubstr("has ended"));
  ends.join();
  EXPECT_THAT(message_of<StoreFailure>([&] { waits.add("k", 1, in(1s)); }),
              HasSubstr("was closed"));
}

TEST_F(StoreEngine, StrangersAreSentAwayAndNobodyElseNotices) {
  StoreClient one = client();
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\n\r\n"),                          // no store's
        StoreMessage(StoreQuery::Validate).number(kMagic + 1).bytes(),  // another magic number
        StoreMessage(StoreQuery::Ping).number(1u).bytes(),              // none
        StoreMessage(StoreQuery::Validate).number(kMagic).bytes() +
            std::string(1, '\x7f'),  // no query
        StoreMessage(StoreQuery::Validate).number(kMagic).bytes() +
            StoreMessage(StoreQuery::Get).number(~uint64_t{0}).bytes(),  // a text without end
        StoreMessage(StoreQuery::Validate).number(kMagic).bytes() +
            StoreMessage(StoreQuery::Get).text("absent").bytes()}) {
    const Fd fd = test::connection_to(port_);
    ASSERT_EQ(send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    char byte;
    EXPECT_LE(recv(fd.get(), &byte, 1, 0), 0);  // closed
  }
  EXPECT_EQ(one.add("count", 1, in(1s)), 1);
}

TEST_F(StoreEngine, RequestsInPiecesAndTogether) {
  const std::string whole = StoreMessage(StoreQuery::Validate).number(kMagic).bytes() +
                            StoreMessage(StoreQuery::Set).text("k").text("value").bytes() +
                            StoreMessage(StoreQuery::Push).text("q").text("1").bytes() +
                            StoreMessage(StoreQuery::Push).text("q").text("2").bytes() +
                            StoreMessage(StoreQuery::QueueLength).text("q").bytes() +
                            StoreMessage(StoreQuery::Pop).text("q").bytes() +
                            StoreMessage(StoreQuery::Wait).number(uint64_t{1}).text("q").bytes() +
                            StoreMessage(StoreQuery::Get).text("k").bytes();
  const std::string want = StoreMessage()
                               .number(int64_t{2})
                               .number(int64_t{1})
                               .text("1")
                               .number(kStopWaiting)
                               .text("value")
                               .bytes();
  for (const size_t piece : {size_t{1}, size_t{7}, whole.size()}) {
    const Fd fd = test::connection_to(port_);
    for (size_t at = 0; at < whole.size(); at += piece) {
      const std::string part = whole.substr(at, piece);
      ASSERT_EQ(send(fd.get(), part.data(), part.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(part.size()));
    }
    std::string got(want.size(), '?');
    ASSERT_EQ(recv(fd.get(), got.data(), got.size(), MSG_WAITALL),
              static_cast<ssize_t>(got.size()));
    EXPECT_EQ(got, want) << piece;
    // One of "1" and "2" is left, which the next round's would find.
    client().wait({"q"}, in(1s));
    const std::string pop = StoreMessage(StoreQuery::Pop).text("q").bytes();
    ASSERT_EQ(send(fd.get(), pop.data(), pop.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(pop.size()));
    std::string left(StoreMessage().number(int64_t{1}).text("2").bytes().size(), '?');
    ASSERT_EQ(recv(fd.get(), left.data(), left.size(), MSG_WAITALL),
              static_cast<ssize_t>(left.size()));
  }
}

// With short values, too, to the last byte.
TEST_F(StoreEngine, WhatIsAddedToAFullOneIsRefusedAndTheConnectionStays) {
  StoreClient one = client();
  int count = 0;
  for (const size_t size : {size_t{63} << 20, size_t{4000}, size_t{100}, size_t{1}}) {
    const std::string value(size, 'x');
    const auto keep = [&] { one.set_confirmed(std::to_string(count++), value, in(10s)); };
    while (message_of<StoreRefusal>(keep) == "nothing") {
    }
  }
  EXPECT_EQ(message_of<StoreRefusal>([&] { one.add("a number of its own", 1, in(10s)); }),
            kStoreIsFull);
  EXPECT_FALSE(one.check({"a number of its own"}, in(10s)));
  EXPECT_TRUE(one.erase("0", in(10s)));
  EXPECT_EQ(one.add("a number of its own", 1, in(10s)), 1);
}

TEST_F(StoreEngine, WhatIsPushedToAFullOneIsRefusedAndTheConnectionStays) {
  const Fd fd = test::connection_to(port_);
  const std::string push =
      StoreMessage(StoreQuery::Push).text("q").text(std::string(size_t{63} << 20, 'x')).bytes();
  std::string all = StoreMessage(StoreQuery::Validate).number(kMagic).bytes();
  for (int i = 0; i < 5; ++i) all += push;
  all += StoreMessage(StoreQuery::Ping).number(uint32_t{7}).bytes();
  for (size_t at = 0; at < all.size();) {
    const ssize_t sent = send(fd.get(), all.data() + at, all.size() - at, MSG_NOSIGNAL);
    ASSERT_GT(sent, 0);
    at += static_cast<size_t>(sent);
  }
  uint32_t answer = 0;
  ASSERT_EQ(recv(fd.get(), &answer, sizeof answer, MSG_WAITALL),
            static_cast<ssize_t>(sizeof answer));
  EXPECT_EQ(answer, ~uint32_t{7});
}

TEST(StoreProtocol, NoPartOfARequestIsARequest) {
  const std::string all =
      StoreMessage(StoreQuery::Validate).number(kMagic).bytes() +
      StoreMessage(StoreQuery::CompareSet).text("k").text("").text("value").bytes() +
      StoreMessage(StoreQuery::MultiSet)
          .number(uint64_t{2})
          .text("a")
          .text("1")
          .text("b")
          .text("2")
          .bytes() +
      StoreMessage(StoreQuery::Add).text("k").number(int64_t{-5}).bytes() +
      StoreMessage(StoreQuery::CountKeys).bytes();
  std::string_view left = all;
  std::vector<StoreRequest> requests;
  while (!left.empty()) {
    std::string_view whole = left;
    const auto request = take_request(whole);
    ASSERT_TRUE(request);
    for (size_t size = 0; size < left.size() - whole.size(); ++size) {
      std::string_view part = left.substr(0, size);
      EXPECT_FALSE(take_request(part));
      EXPECT_EQ(part.size(), size);
    }
    requests.push_back(*request);
    left = whole;
  }
  ASSERT_EQ(requests.size(), 5u);
  EXPECT_THAT(requests[1].texts, ElementsAre("k", "", "value"));
  EXPECT_THAT(requests[2].texts, ElementsAre("a", "1", "b", "2"));
  EXPECT_EQ(requests[3].number, -5);
}

}  // namespace
}  // namespace lockstep::comm
