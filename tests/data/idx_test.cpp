#include "lockstep/data/idx.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "data/files.h"
#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

using test::Folder;
using test::gzip;
using test::idx;
using test::message_of;
using test::write;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class Idx : public testing::Test {
 protected:
  // The message of reading a file of these bytes; it always names the file.
  std::string failure(const std::string& bytes) {
    write(file_, bytes);
    const std::string message = message_of<DataError>([&] { read_idx(file_); });
    EXPECT_THAT(message, HasSubstr(file_.string()));
    return message;
  }

  Folder folder_;
  std::filesystem::path file_ = folder_ / "file";
};

TEST_F(Idx, ReadsPlainAndGzipAlike) {
  const std::string bytes = idx({2, 3}, "abcdef");
  for (const std::string& stored : {bytes, gzip(bytes)}) {
    write(file_, stored);
    const IdxArray array = read_idx(file_);
    EXPECT_THAT(array.sizes, ElementsAre(2, 3));
    EXPECT_THAT(array.bytes, ElementsAre('a', 'b', 'c', 'd', 'e', 'f'));
  }
}

TEST_F(Idx, ReadsNoElements) {
  write(file_, idx({0, 28, 28}, ""));
  EXPECT_THAT(read_idx(file_).sizes, ElementsAre(0, 28, 28));
}

TEST_F(Idx, MissingFile) {
  EXPECT_THAT(message_of<DataError>([&] { read_idx(file_); }),
              AllOf(HasSubstr(file_.string()), HasSubstr("No such file")));
}

TEST_F(Idx, Folder) {
  EXPECT_THAT(message_of<DataError>([&] { read_idx(folder_.path()); }), HasSubstr("directory"));
}

TEST_F(Idx, EmptyFile) { EXPECT_THAT(failure(""), HasSubstr("expected a header")); }

TEST_F(Idx, TruncatedHeader) {
  EXPECT_THAT(failure(idx({2, 3}, "").substr(0, 10)),
              HasSubstr("the header ends before dimension 2 of 2"));
}

TEST_F(Idx, TruncatedPlain) {
  EXPECT_THAT(failure(idx({20, 3}, "abcde")),
              AllOf(HasSubstr("expected 20 x 3 = 60 elements"), HasSubstr("17 bytes")));
  EXPECT_THAT(failure(idx({2, 3}, "abcde")), HasSubstr("expected 2 x 3 = 6 elements, found 5"));
}

TEST_F(Idx, TruncatedGzip) {
  const std::string packed = gzip(idx({1000}, std::string(1000, 'x')));
  EXPECT_THAT(failure(packed.substr(0, packed.size() / 2)),
              HasSubstr("truncated: the gzip stream"));
}

TEST_F(Idx, GzipWithoutItsChecksum) {
  const std::string packed = gzip(idx({6}, "abcdef"));
  EXPECT_THAT(failure(packed.substr(0, packed.size() - 8)),
              HasSubstr("truncated: the gzip stream"));
}

TEST_F(Idx, GarbledGzip) {
  std::string packed = gzip(idx({6}, "abcdef"));
  packed[packed.size() - 8] = static_cast<char>(packed[packed.size() - 8] ^ 1);
  EXPECT_THAT(failure(packed), AllOf(HasSubstr("garbled"), HasSubstr("incorrect data check")));
}

TEST_F(Idx, NeitherGzipNorIdx) {
  EXPECT_THAT(failure("<!DOCTYPE html>"),
              AllOf(HasSubstr("wrong magic"), HasSubstr("found 3c 21 44 4f (not gzip)")));
}

TEST_F(Idx, GzipOfSomethingElse) {
  EXPECT_THAT(failure(gzip("hello, world")), HasSubstr("(unpacked from gzip)"));
}

TEST_F(Idx, OtherElementType) {
  EXPECT_THAT(failure(std::string("\0\0\x0d\1\0\0\0\1abcd", 12)), HasSubstr("found 00 00 0d 01"));
}

TEST_F(Idx, NoDimensions) { EXPECT_THAT(failure(idx({}, "")), HasSubstr("wrong magic")); }

TEST_F(Idx, TooLong) {
  EXPECT_THAT(failure(idx({2}, "abc")), HasSubstr("too long: expected 2 = 2 elements"));
  EXPECT_THAT(failure(gzip(idx({2}, "abc"))), HasSubstr("too long"));
}

TEST_F(Idx, SizesThatOverflow) {
  EXPECT_THAT(failure(idx({0xffffffff, 0xffffffff, 0xffffffff}, "abc")),
              HasSubstr("do not fit into 64 bits"));
}

TEST_F(Idx, SizesBeyondMemory) {
  EXPECT_THAT(failure(idx({0xffffffff, 0x7fffffff}, "abc")), HasSubstr("holds at most"));
  EXPECT_THAT(failure(gzip(idx({0xffffffff, 0x7fffffff}, "abc"))), HasSubstr("holds at most"));
}

// Bytes changed, cut out and put in: an array whose size is the product of its sizes, or DataError.
TEST_F(Idx, AnyDamageIsAnError) {
  std::mt19937 random(1);
  const std::string plain = idx({4, 5}, "abcdefghijklmnopqrst");
  for (const std::string& whole : {plain, gzip(plain)}) {
    int refused = 0;
    for (int round = 0; round < 500; ++round) {
      std::string bytes = whole;
      for (uint32_t damage = random() % 3; damage < 3 && !bytes.empty(); ++damage) {
        const size_t at = random() % bytes.size();
        switch (random() % 3) {
          case 0:
            bytes[at] = static_cast<char>(random());
            break;
          case 1:
            bytes.erase(at, 1 + random() % 8);
            break;
          default:
            bytes.insert(at, 1, static_cast<char>(random()));
        }
      }
      write(file_, bytes);
      try {
        const IdxArray array = read_idx(file_);
        int64_t count = 1;
        for (const int64_t size : array.sizes) count *= size;
        EXPECT_EQ(count, static_cast<int64_t>(array.bytes.size()));
      } catch (const DataError&) {
        ++refused;
      }
    }
    EXPECT_GT(refused, 250);
  }
}

}  // namespace
}  // namespace lockstep::data
