// One word for all ranks, through MPICH's process manager. The real ones:
// tests/system/schedulers_test.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <string>
#include <thread>
#include <vector>

#include "core/place/exchange.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

// A process manager that says `answers`, one to each line that it hears, and then leaves.
class Manager {
 public:
  explicit Manager(std::vector<std::string> answers) {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends_.data()), 0);
    thread_ = std::thread([this, answers = std::move(answers)] {
      for (const std::string& answer : answers) {
        std::string line;
        for (char c = 0; c != '\n' && read(ends_[1], &c, 1) == 1;) line += c;
        heard_ += line;
        if (write(ends_[1], answer.data(), answer.size()) < 0) break;
      }
      shutdown(ends_[1], SHUT_WR);
    });
  }
  ~Manager() {
    close(ends_[0]);
    if (thread_.joinable()) thread_.join();
    close(ends_[1]);
  }

  int fd() const { return ends_[0]; }
  std::string heard() {
    thread_.join();
    return heard_;
  }

 private:
  std::array<int, 2> ends_{};
  std::string heard_;
  std::thread thread_;
};

const std::string kHello = "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n";
const std::string kSpace = "cmd=my_kvsname kvsname=kvs_1\n";
const std::string kWord = "cmd=get_result rc=0 msg=success value=10.0.0.1:2345\n";

std::string error_of(Manager& manager) {
  try {
    return exchange_over_pmi(manager.fd(), "", 10s);
  } catch (const CommError& error) {
    return error.what();
  }
}

TEST(Pmi, RankZerosWordReachesAll) {
  Manager first({kHello, kSpace, "cmd=put_result rc=0 msg=success\n", "cmd=barrier_out\n", kWord,
                 "cmd=finalize_ack\n"});
  EXPECT_EQ(exchange_over_pmi(first.fd(), "10.0.0.1:2345", 10s), "10.0.0.1:2345");
  EXPECT_EQ(first.heard(),
            "cmd=init pmi_version=1 pmi_subversion=1\ncmd=get_my_kvsname\n"
            "cmd=put kvsname=kvs_1 key=lockstep-meeting value=10.0.0.1:2345\ncmd=barrier_in\n"
            "cmd=get kvsname=kvs_1 key=lockstep-meeting\ncmd=finalize\n");
  Manager other({kHello, kSpace, "cmd=barrier_out\n", kWord, "cmd=finalize_ack\n"});
  EXPECT_EQ(exchange_over_pmi(other.fd(), "", 10s), "10.0.0.1:2345");
}

TEST(Pmi, AWrongAnswerIsQuoted) {
  Manager refusing({"cmd=response_to_init rc=-1\n"});
  EXPECT_THAT(error_of(refusing), HasSubstr("answered 'cmd=response_to_init rc=-1' to 'cmd=init"));
  Manager babbling({kHello, "hello\n"});
  EXPECT_THAT(error_of(babbling), HasSubstr("answered 'hello' to 'cmd=get_my_kvsname'"));
  Manager forgetful({kHello, kSpace, "cmd=barrier_out\n", "cmd=get_result rc=0 msg=success\n"});
  EXPECT_THAT(error_of(forgetful), HasSubstr("without value"));
  Manager endless({std::string(5000, 'x')});
  EXPECT_THAT(error_of(endless), HasSubstr("answers without end"));
}

TEST(Pmi, AManagerThatLeavesIsAnError) {
  Manager leaving({kHello});
  EXPECT_THAT(error_of(leaving), HasSubstr("has closed the connection; set MASTER_ADDR"));
}

TEST(Pmi, ASilentManagerIsADeadline) {
  std::array<int, 2> ends{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  EXPECT_THROW((void)exchange_over_pmi(ends[0], "", 20ms), CommError);
  close(ends[0]);
  close(ends[1]);
}

}  // namespace
}  // namespace lockstep
