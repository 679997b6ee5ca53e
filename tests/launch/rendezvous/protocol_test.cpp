// What launchers say to each other as bytes, and what becomes of other bytes.
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <random>

#include "launch/rendezvous/network/secure_channel.h"
#include "support/folder.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;

const std::string kSecret = "0123456789abcdef0123456789abcdef";

Keys keys_of(const std::string& secret, bool tls = false) {
  Keys keys = Keys::of(Token(secret), "job");
  keys.use_tls = tls;
  return keys;
}

std::vector<Message> one_of_each() {
  const Failure failure{Failure::Kind::Lost, -1, 137, "host2 was lost",
                        std::chrono::milliseconds(3)};
  Start start{7, {}, "10.0.0.1", 40000, "rank 3 failed"};
  for (NodeId id = 1; id <= 300; ++id) start.hosts.push_back({id * 1000, 8});
  return {Join{0xFFFF'FFFF'FFFF'FFFF,
               "host2",
               -1,
               4,
               "10.0.0.2",
               {1, 2, 3, std::chrono::seconds(7), std::chrono::seconds(2), 99, "train --lr 1"},
               {0xFFFF'FFFF'FFFF'FFFF, 7, 3, 12, true}},
          Welcome{7, 100, 4, 12},
          Wait{"why"},
          Refuse{""},
          Ping{1},
          Pong{0},
          Ready{2, 65535, failure},
          Failed{2, failure},
          Done{1},
          Remark{9, "rank 3 on host2 is stopped"},
          start,
          Stop{4, 15, "because"},
          End{-1, std::string(4000, 'x')}};
}

TEST(Codec, EveryMessageComesBack) {
  EXPECT_EQ(one_of_each().size(), std::variant_size_v<Message>);
  for (const Message& message : one_of_each()) {
    EXPECT_EQ(decode(encode(message)), message) << message.index();
  }
}

TEST(Codec, EveryCutAndEveryExtraByteIsNamed) {
  for (const Message& message : one_of_each()) {
    const std::string bytes = encode(message);
    for (size_t length = 0; length < bytes.size(); ++length) {
      EXPECT_THROW(decode(bytes.substr(0, length)), ProtocolError)
          << message.index() << " " << length;
    }
    EXPECT_THROW(decode(bytes + '\0'), ProtocolError) << message.index();
  }
}

TEST(Codec, AForgedLengthAsksForNoMemory) {
  std::string bytes = encode(Start{});
  bytes[2] = '\x7f';  // 127 hosts
  EXPECT_THROW(decode(bytes), ProtocolError);
  bytes = bytes.substr(0, 2) + "\xff\xff\xff\xff\xff\xff\xff\xff\x7f";
  EXPECT_THROW(decode(bytes), ProtocolError);
}

TEST(Codec, LongTextsAreCutAndTheOrderOfManyHostsFits) {
  const Message message = decode(encode(Wait{std::string(100'000, 'y')}));
  EXPECT_EQ(std::get<Wait>(message).reason.size(), 4000U);
  Start start;
  for (NodeId id = 1; id <= 50'000; ++id) start.hosts.push_back({id, 8});
  EXPECT_LT(encode(start).size(), kMostBytes);
}

// Carries bytes between both until neither has any, `piece` at a time.
void converse(SecureChannel& a, SecureChannel& b, size_t piece = 1 << 20) {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto [from, to] : {std::pair(&a, &b), std::pair(&b, &a)}) {
      const std::string bytes = from->take_output();
      for (size_t at = 0; at < bytes.size(); at += piece) to->feed(bytes.substr(at, piece));
      moved = moved || !bytes.empty();
    }
  }
}

class Talk : public ::testing::TestWithParam<bool> {
 protected:
  Keys keys() const { return keys_of(kSecret, GetParam()); }
};

TEST_P(Talk, MessagesArriveInOrderHoweverTheStreamIsCut) {
  for (const size_t piece : {size_t{1}, size_t{7}, size_t{1} << 20}) {
    SecureChannel caller(SecureChannel::Side::Caller, keys());
    SecureChannel called(SecureChannel::Side::Called, keys());
    converse(caller, called, piece);
    ASSERT_TRUE(caller.is_open());
    ASSERT_TRUE(called.is_open());
    for (const Message& message : one_of_each()) caller.send(encode(message));
    called.send(encode(Ping{5}));
    converse(caller, called, piece);
    const auto messages = called.take_messages();
    ASSERT_EQ(messages.size(), one_of_each().size());
    for (size_t i = 0; i < messages.size(); ++i) EXPECT_EQ(*messages[i], one_of_each()[i]);
    EXPECT_EQ(caller.take_messages().size(), 1U);
  }
}

std::string refusal(SecureChannel& caller, SecureChannel& called) {
  try {
    converse(caller, called);
  } catch (const ProtocolError& error) {
    return error.what();
  }
  return "";
}

TEST_P(Talk, AnotherTokenIsRefused) {
  SecureChannel caller(SecureChannel::Side::Caller,
                       keys_of("another secret, long enough", GetParam()));
  SecureChannel called(SecureChannel::Side::Called, keys());
  EXPECT_THAT(refusal(caller, called), HasSubstr("token"));
  EXPECT_FALSE(called.is_open());
  EXPECT_FALSE(caller.is_open());
}

TEST_P(Talk, AnotherJobIsRefused) {
  Keys other = Keys::of(Token(kSecret), "another job");
  other.use_tls = GetParam();
  SecureChannel caller(SecureChannel::Side::Caller, other);
  SecureChannel called(SecureChannel::Side::Called, keys());
  EXPECT_THAT(refusal(caller, called), HasSubstr("token"));
}

TEST_P(Talk, AnotherVersionIsNamedByBoth) {
  SecureChannel caller(SecureChannel::Side::Caller, keys(), 9);
  SecureChannel called(SecureChannel::Side::Called, keys());
  EXPECT_THAT(refusal(caller, called),
              HasSubstr("speaks version 9 of the protocol, this one version 3"));
  EXPECT_THAT(refusal(caller, called),
              HasSubstr("speaks version 3 of the protocol, this one version 9"));
}

TEST_P(Talk, EveryChangedBitEndsTheConversation) {
  SecureChannel probe_caller(SecureChannel::Side::Caller, keys());
  SecureChannel probe_called(SecureChannel::Side::Called, keys());
  converse(probe_caller, probe_called);
  probe_caller.send(encode(Failed{1, {}}));
  const size_t bits = probe_caller.take_output().size() * 8;
  ASSERT_GT(bits, 100U);
  for (size_t bit = 0; bit < bits; bit += GetParam() ? 7 : 1) {
    SecureChannel caller(SecureChannel::Side::Caller, keys());
    SecureChannel called(SecureChannel::Side::Called, keys());
    converse(caller, called);
    caller.send(encode(Failed{1, {}}));
    std::string bytes = caller.take_output();
    bytes[bit / 8] ^= static_cast<char>(1 << bit % 8);
    bool accepted = false;
    try {
      called.feed(bytes);
      accepted = !called.take_messages().empty();
    } catch (const ProtocolError&) {
    }
    EXPECT_FALSE(accepted) << "bit " << bit;
  }
}

INSTANTIATE_TEST_SUITE_P(Streams, Talk, ::testing::Bool(),
                         [](const auto& one) { return one.param ? "tls" : "plain"; });

TEST(SecureChannel, ARepeatedOrLeftOutMessageEndsIt) {
  SecureChannel caller(SecureChannel::Side::Caller, keys_of(kSecret));
  SecureChannel called(SecureChannel::Side::Called, keys_of(kSecret));
  converse(caller, called);
  caller.send(encode(Ping{1}));
  const std::string first = caller.take_output();
  called.feed(first);
  EXPECT_THROW(called.feed(first), ProtocolError);

  SecureChannel other(SecureChannel::Side::Caller, keys_of(kSecret));
  SecureChannel answering(SecureChannel::Side::Called, keys_of(kSecret));
  converse(other, answering);
  other.send(encode(Ping{1}));
  (void)other.take_output();
  other.send(encode(Ping{2}));
  EXPECT_THROW(answering.feed(other.take_output()), ProtocolError);
}

TEST(SecureChannel, AnEchoOfOurOwnProofIsRefused) {
  SecureChannel caller(SecureChannel::Side::Caller, keys_of(kSecret));
  caller.feed(caller.take_output());  // its own greeting
  EXPECT_THROW(caller.feed(caller.take_output()), ProtocolError);
}

TEST(SecureChannel, AStrangersBytesAreQuotedAtTheFirstThatDiffers) {
  SecureChannel called(SecureChannel::Side::Called, keys_of(kSecret));
  try {
    called.feed("GET / HTTP/1.1\r\n");
    FAIL();
  } catch (const ProtocolError& error) {
    EXPECT_THAT(error.what(), HasSubstr("a program that is not a launcher sent 'GET / HT'"));
  }
  EXPECT_EQ(called.take_output(), "");
}

TEST(SecureChannel, AStrangerThatBeginsAsTlsDoesIsToldOfTheFlag) {
  SecureChannel caller(SecureChannel::Side::Caller, keys_of(kSecret, true));
  SecureChannel called(SecureChannel::Side::Called, keys_of(kSecret, false));
  const std::string said = refusal(caller, called);
  EXPECT_THAT(said, HasSubstr("a program that is not a launcher sent '\\x16\\x03"));
  EXPECT_THAT(said, HasSubstr("as TLS begins: give --tls (or --rdzv-conf tls=1) to the launchers"));
}

TEST(SecureChannel, NoRandomBytesAreTakenForALauncher) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 2000; ++i) {
    SecureChannel called(SecureChannel::Side::Called, keys_of(kSecret, i % 2 == 1));
    std::string bytes = i % 3 == 0 ? "LOCKSTEP" : "";
    for (int j = 0; j < 200; ++j) bytes += static_cast<char>(random());
    // TLS may wait for the rest of a record that the bytes announce.
    bool refused = false;
    try {
      called.feed(bytes);
    } catch (const ProtocolError&) {
      refused = true;
    }
    EXPECT_TRUE(refused || i % 2 == 1);
    EXPECT_FALSE(called.is_open());
  }
}

TEST(SecureChannel, PlainAndTlsDoNotMeet) {
  for (const bool tls : {false, true}) {
    SecureChannel caller(SecureChannel::Side::Caller, keys_of(kSecret, tls));
    SecureChannel called(SecureChannel::Side::Called, keys_of(kSecret, !tls));
    EXPECT_NE(refusal(caller, called), "");
  }
}

TEST(Token, IsLongEnoughAndComesFromOnePlace) {
  EXPECT_THROW(Token("short"), ConfigError);
  EXPECT_THROW(Token(std::string(32, ' ')), ConfigError);
  EXPECT_THROW(Token("short" + std::string(32, ' ')), ConfigError);
  unsetenv("LOCKSTEP_TOKEN");
  unsetenv("LOCKSTEP_TOKEN_FILE");
  try {
    (void)Token::from_env();
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("openssl rand -hex 32"));
  }
  const test::Folder folder;
  const std::string path = folder / "token";
  FILE* file = fopen(path.c_str(), "w");
  fputs((kSecret + "\n").c_str(), file);
  fchmod(fileno(file), 0644);
  fclose(file);
  setenv("LOCKSTEP_TOKEN_FILE", path.c_str(), 1);
  EXPECT_THROW((void)Token::from_env(), ConfigError);  // others may read it
  for (const mode_t mode : {0620, 0602}) {
    chmod(path.c_str(), mode);
    EXPECT_THROW((void)Token::from_env(), ConfigError) << mode;  // or replace it
  }
  const std::string folder_itself = folder / ".";
  setenv("LOCKSTEP_TOKEN_FILE", folder_itself.c_str(), 1);
  EXPECT_THAT([] { (void)Token::from_env(); },
              ::testing::ThrowsMessage<ConfigError>(HasSubstr("/.: it is a directory")));
  setenv("LOCKSTEP_TOKEN_FILE", path.c_str(), 1);
  chmod(path.c_str(), 0600);
  EXPECT_EQ(Token::from_env().key("a", "b"), Token(kSecret).key("a", "b"));
  setenv("LOCKSTEP_TOKEN", kSecret.c_str(), 1);
  EXPECT_THROW((void)Token::from_env(), ConfigError);  // which?
  unsetenv("LOCKSTEP_TOKEN_FILE");
  EXPECT_EQ(Token::from_env().key("a", "b"), Token(kSecret).key("a", "b"));
  // As of a YAML's block, where another host has the file.
  for (const char* end : {"\n", "\r\n", " "}) {
    setenv("LOCKSTEP_TOKEN", (kSecret + end).c_str(), 1);
    EXPECT_EQ(Token::from_env().key("a", "b"), Token(kSecret).key("a", "b"));
  }
  unsetenv("LOCKSTEP_TOKEN");
}

TEST(Token, TextsAreTakenApart) {
  EXPECT_NE(hmac("key", {"ab", "c"}), hmac("key", {"a", "bc"}));
  EXPECT_NE(hmac("key", {"ab"}), hmac("kez", {"ab"}));
  // printf '\0\0\0\2ab' | openssl dgst -sha256 -hmac key
  EXPECT_EQ(fmt::format("{:02x}", fmt::join(hmac("key", {"ab"}), "")),
            "84f976e81364b98061972a7a6aad08d429f2a34d6abaa4926c2c582d8020ab11");
}

}  // namespace
}  // namespace lockstep::launch::testing
