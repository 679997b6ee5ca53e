// Ranks that wait long compare their calls through the store, which may not answer at the moment.
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <optional>
#include <string>

#include "comm/health/group_health.h"
#include "comm/store/store.h"
#include "lockstep/core/error.h"
#include "support/loopback.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

class Waiter final : public GroupHealth {
 public:
  Waiter(const Store& store, int rank) : GroupHealth("test", store, rank, {0, 1}) {}
  using GroupHealth::attend;

 private:
  void abort(const std::string&) noexcept override {}
  void leave() noexcept override {}
};

// A call that began `ago`.
WireOperation call(const std::string& name, steady_clock::duration ago) {
  return {.notice = {.lane = "all", .number = 7, .signature = name, .text = name},
          .timeout = 1h,
          .start = steady_clock::now() - ago};
}

// A store in a process of its own, which can be stopped.
class StoreProcess {
 public:
  StoreProcess() {
    LoopbackSocket socket;
    socket.listen();
    port_ = socket.port;
    pid_ = fork();
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const Store store = Store::connect(
        {.host = "127.0.0.1", .port = port_, .server = true, .listen_fd = socket.fd.release()});
    for (;;) pause();
  }
  ~StoreProcess() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  StoreProcess(const StoreProcess&) = delete;
  StoreProcess& operator=(const StoreProcess&) = delete;

  Store connect() const {
    return Store::connect({.host = "127.0.0.1", .port = port_, .timeout = 60s});
  }
  void stop() const {
    kill(pid_, SIGSTOP);
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, WUNTRACED), pid_);
  }
  void go_on() const { kill(pid_, SIGCONT); }

 private:
  using LoopbackSocket = test::LoopbackSocket;
  int port_ = 0;
  pid_t pid_ = -1;
};

TEST(LongWait, ComparesCallsAgainWhenTheStoreDidNotAnswer) {
  const StoreProcess server;
  const Store store = server.connect();
  Waiter saves(store, 0), steps(store, 1);
  WireOperation save = call("all_gather", 2s), step = call("all_reduce", 2s);
  saves.attend(save);  // the first: nobody else is there to compare with
  server.stop();
  steps.attend(step);
  server.go_on();
  std::optional<std::string> error;
  for (const auto end = steady_clock::now() + 30s; !error && steady_clock::now() < end;) {
    step.start -= 1s;  // as if it had waited so long
    try {
      steps.attend(step);
    } catch (const CommError& thrown) {
      error = thrown.what();
    }
  }
  ASSERT_TRUE(error);
  EXPECT_NE(error->find("is not what the others called"), std::string::npos) << *error;
}

// Later calls, in which it did not wait long, have left no notice.
TEST(LongWait, OfARankInNoCallTheLastLongWaitIsNamedAsThat) {
  const StoreProcess server;
  const Store store = server.connect();
  Waiter waits(store, 0), computes(store, 1);
  WireOperation save = call("barrier", 2s);
  computes.attend(save);
  computes.done(save);
  WireOperation step = call("all_reduce", 2s);
  step.notice.number = 9;
  step.timeout = 1s;
  const std::string said = test::message_of([&] { waits.attend(step); });
  EXPECT_NE(said.find("rank 1 is in no call, and the last in which it waited for more than 1 s was "
                      "barrier"),
            std::string::npos)
      << said;
}

}  // namespace
}  // namespace lockstep::comm
