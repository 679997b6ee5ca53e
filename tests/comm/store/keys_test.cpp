#include "comm/store/keys.h"

#include <gmock/gmock.h>

#include <string>

#include "lockstep/comm/world.h"
#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using test::message_of;
using testing::HasSubstr;
using namespace std::chrono_literals;

TEST(KeyValueStore, AWaitOfTheOnlyRankEndsWithTheWorldsTimeout) {
  test::isolated([] {
    const KeyValueStore store = World::from_env({.timeout = 50ms}).store();
    EXPECT_THAT(message_of<CommError>([&] { store.get("absent"); }),
                HasSubstr("wait for absent: no rank has set it within"));
    EXPECT_THROW(store.wait({"absent"}), CommError);
    EXPECT_THROW(store.get("absent", 10ms), CommError);
  });
}

// Of one rank and of two.
TEST(KeyValueStore, StaysUsableWhereItIsFull) {
  for (const int ranks : {1, 2}) {
    test::spawn(ranks, [](World& world) {
      if (world.is_main()) {
        const auto& store = world.store();
        const std::string large(size_t{60} << 20, 'x');
        for (const char* key : {"a", "b", "c", "d"}) store.set(key, large);
        const auto refused = [](const auto& call) { return message_of<ConfigError>(call); };
        EXPECT_THAT(refused([&] { store.set("e", large); }), HasSubstr("set e: the store is full"));
        EXPECT_THAT(refused([&] { store.compare_set("e", "", large); }),
                    HasSubstr("compare_set e: the store is full: it holds 256 MiB in all"));
        EXPECT_FALSE(store.contains("e"));
        EXPECT_EQ(store.compare_set("e", "", "short"), "short");
        EXPECT_EQ(store.compare_set("e", "other", "more"), "short");
        EXPECT_EQ(store.add("count", 3), 3);
        EXPECT_THAT(refused([&] { store.compare_set("e", "short", large); }),
                    HasSubstr("the store is full"));
        EXPECT_EQ(store.get("e"), "short");
      }
      world.group().barrier().wait();
    });
  }
}

TEST(KeyValueStore, ErrorsQuoteTheBeginningOfALongKey) {
  for (const int ranks : {1, 2}) {
    test::spawn(ranks, [](World& world) {
      const auto expect_short = [](const std::string& error, std::string_view count) {
        EXPECT_THAT(error, HasSubstr("kkk... (" + std::string(count)));
        EXPECT_LT(error.size(), 500u);
      };
      if (world.is_main()) {
        const KeyValueStore& store = world.store();
        const std::string huge(size_t{70} << 20, 'k'), large(size_t{1} << 20, 'k');
        expect_short(message_of<ConfigError>([&] { store.set(huge, ""); }), "7340");
        expect_short(message_of<CommError>([&] { (void)store.get(large, 10ms); }), "104");
        store.set(large, "text");
        expect_short(message_of<ConfigError>([&] { (void)store.add(large, 1); }), "104");
      }
      world.group().barrier().wait();
    });
  }
}

}  // namespace
}  // namespace lockstep::comm
