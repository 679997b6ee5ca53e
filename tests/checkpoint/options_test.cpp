// What a Checkpointer is told when it is made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/core/error.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::CheckpointerOptions;
using checkpoint::Retention;
using testing::HasSubstr;

// Elsewhere -1 keeps all; here it removed each checkpoint as soon as it was published.
TEST(CheckpointerOptions, ThatMakeNoSenseAreRefused) {
  isolated([] {
    const Folder folder;
    const auto told = [&](CheckpointerOptions options) {
      return message_of<ConfigError>(
          [&] { Checkpointer(World::solo(), folder.path(), std::move(options)); });
    };
    EXPECT_THAT(told({.retention = {.keep_last = -1}}),
                HasSubstr("[checkpoint] Retention::keep_last = -1: give 0, which keeps all"));
    EXPECT_THAT(told({.retention = {.keep_every = -5}}), HasSubstr("keep_every = -5"));
    EXPECT_THAT(told({.retention = {.best = Retention::Best{"loss", 0}}}), HasSubstr("keep = 0"));
    EXPECT_THAT(told({.retention = {.best = Retention::Best{""}}}), HasSubstr("has no metric"));
    EXPECT_THAT(told({.timeout = std::chrono::milliseconds(0)}), HasSubstr("timeout = 0"));
    EXPECT_EQ(told({}), "nothing");
  });
}

// Knows the mask of signals of a thread that writes, other than the one that made this.
class Asking : public checkpoint::FileSystem {
 public:
  ssize_t write(int fd, const char* bytes, size_t count) override {
    if (std::this_thread::get_id() != own_) {
      pthread_sigmask(SIG_SETMASK, nullptr, &mask);
      was_asked = true;
    }
    return FileSystem::write(fd, bytes, count);
  }
  bool was_asked = false;
  sigset_t mask{};

 private:
  const std::thread::id own_ = std::this_thread::get_id();
};

// They are for the program's threads: a handler may be bound to one, or a program may block them
// all and ask for them by sigwait(), after which another thread's share would end the process.
TEST(CheckpointerOptions, TheThreadInTheBackgroundTakesNoSignals) {
  isolated([] {
    const Folder folder;
    Asking files;
    torch::nn::Linear net(2, 2);
    Checkpointer checkpoints(World::solo(), folder.path(), {.async = true, .files = &files});
    checkpoints.track("net", *net);
    checkpoints.save(1);
    checkpoints.finish();
    ASSERT_TRUE(files.was_asked);
    for (const int number : {SIGINT, SIGTERM, SIGALRM})
      EXPECT_EQ(sigismember(&files.mask, number), 1) << number;
    EXPECT_EQ(sigismember(&files.mask, SIGBUS), 0);
  });
}

}  // namespace
}  // namespace lockstep::test
