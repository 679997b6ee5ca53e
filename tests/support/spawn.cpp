#include "support/spawn.h"

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>

#include "support/fork.h"
#include "support/loopback.h"

namespace lockstep::test {
namespace {

// Collects what a rank's EXPECTs and FAILs say, and sends it to the parent.
class Reporter : public testing::EmptyTestEventListener {
 public:
  explicit Reporter(int fd) : fd_(fd) {}
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    say(std::string(result.file_name() ? result.file_name() : "?") + ":" +
        std::to_string(result.line_number()) + ": " + result.message() + "\n");
  }
  void say(const std::string& text) {
    for (size_t at = 0; at < text.size();) {
      const ssize_t n = write(fd_, text.data() + at, text.size() - at);
      if (n <= 0) return;
      at += n;
    }
  }

 private:
  int fd_;
};

[[noreturn]] void run_rank(int rank, int ranks, LoopbackSocket& store, int report_fd,
                           const std::function<void(int)>& body, const SpawnOptions& options) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto set = [](const char* name, const std::string& value) {
    setenv(name, value.c_str(), 1);
  };
  for (const char* prefix : {"", "LOCAL_"}) {
    set((std::string(prefix) + "RANK").c_str(), std::to_string(rank));
    set((std::string(prefix) + "WORLD_SIZE").c_str(), std::to_string(ranks));
  }
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(store.port));
  set("LOCKSTEP_BACKEND", options.backend);
  if (!options.hosts.empty()) set("LOCKSTEP_HOST", std::to_string(options.hosts[rank]));
  if (rank == 0) {
    set("LOCKSTEP_STORE_FD", std::to_string(store.fd.release()));
  } else {
    store.fd.reset();
  }
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  auto* const reporter = new Reporter(report_fd);  // GoogleTest's, where the rank calls exit()
  listeners.Append(reporter);
  at::set_num_threads(1);
  int status = 0;
  try {
    body(rank);
  } catch (const std::exception& error) {
    reporter->say(std::string("exception: ") + error.what() + "\n");
    status = 1;
  }
  // Nothing of the parent's test is to be run down here.
  _exit(status);
}

std::string read_all(int fd) {
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = read(fd, buffer, sizeof buffer)) > 0;) text.append(buffer, n);
  return text;
}

}  // namespace

std::string Ranks::name() const {
  std::string name = backend + std::to_string(count);
  for (const int host : hosts) name += "_" + std::to_string(host);
  return name;
}

std::vector<int> spawn_bare(int ranks, const std::function<void(int)>& body,
                            const SpawnOptions& options) {
  LoopbackSocket store;  // rank 0 inherits it
  store.listen();
  std::vector<pid_t> pids;
  std::vector<int> reports;
  for (int rank = 0; rank < ranks; ++rank) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    const pid_t pid = fork();
    if (pid == 0) {
      for (int fd : reports) close(fd);
      close(ends[0]);
      run_rank(rank, ranks, store, ends[1], body, options);
    }
    close(ends[1]);
    pids.push_back(pid);
    reports.push_back(ends[0]);
  }
  store.fd.reset();
  std::vector<int> statuses;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string report = read_all(reports[rank]);
    close(reports[rank]);
    int status = 0;
    waitpid(pids[rank], &status, 0);
    statuses.push_back(status);
    const bool doomed =
        std::find(options.doomed.begin(), options.doomed.end(), rank) != options.doomed.end();
    if (doomed) continue;
    if (!report.empty()) ADD_FAILURE() << "rank " << rank << " of " << ranks << ": " << report;
    if (report.empty() && status != 0) {
      ADD_FAILURE() << "rank " << rank << " of " << ranks << " ended with wait status " << status;
    }
  }
  return statuses;
}

std::vector<int> spawn(int ranks, const std::function<void(World&)>& body,
                       const SpawnOptions& options) {
  return spawn_bare(
      ranks,
      [&](int) {
        World world = World::from_env({.timeout = options.timeout});
        body(world);
      },
      options);
}

}  // namespace lockstep::test

#ifdef __SANITIZE_ADDRESS__
// Read by LeakSanitizer.
extern "C" int __lsan_is_turned_off();
extern "C" int __lsan_is_turned_off() { return lockstep::test::is_child ? 1 : 0; }

// Allocations that are too large fail, as they do elsewhere.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

// libcrypto's state of threads that call groups after its own end.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libcrypto.so\n"; }
#endif
