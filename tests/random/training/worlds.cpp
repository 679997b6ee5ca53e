#include "random/training/worlds.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "lockstep/core/error.h"
#include "random/training/features.h"
#include "support/loopback.h"

namespace lockstep::test::training {
namespace {

// What a rank says about program `index`.
struct Report {
  char kind = 'b';  // begins, good, different, thrown, failed communication
  size_t index = 0;
  std::string text;
};

void say(int fd, const Report& report) {
  const std::string line =
      fmt::format("{}{:08x}{:08x}{}", report.kind, report.index, report.text.size(), report.text);
  for (size_t at = 0; at < line.size();) {
    const ssize_t n = write(fd, line.data() + at, line.size() - at);
    if (n <= 0) return;
    at += static_cast<size_t>(n);
  }
}

// create_graph warns each time.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Takes whole reports off the front of what was read.
std::vector<Report> take_reports(std::string& bytes) {
  std::vector<Report> reports;
  while (bytes.size() >= 17) {
    const size_t size = std::stoul(bytes.substr(9, 8), nullptr, 16);
    if (bytes.size() < 17 + size) break;
    reports.push_back(
        {bytes[0], std::stoul(bytes.substr(1, 8), nullptr, 16), bytes.substr(17, size)});
    bytes.erase(0, 17 + size);
  }
  return reports;
}

[[noreturn]] void run_rank(int rank, LoopbackSocket& store, int fd,
                           const std::vector<Program>& programs, size_t begin,
                           const Limits& limits) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const Program& first = programs[begin];
  const auto set = [](const char* name, const std::string& value) {
    setenv(name, value.c_str(), 1);
  };
  for (const std::string prefix : {"", "LOCAL_"}) {
    set((prefix + "RANK").c_str(), std::to_string(rank));
    set((prefix + "WORLD_SIZE").c_str(), std::to_string(first.ranks));
  }
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(store.port));
  set("LOCKSTEP_BACKEND", first.backend == "solo" ? "auto" : first.backend);
  if (!first.hosts.empty()) set("LOCKSTEP_HOST", std::to_string(first.hosts.at(rank)));
  if (rank == 0) {
    set("LOCKSTEP_STORE_FD", std::to_string(store.fd.release()));
  } else {
    store.fd.reset();
  }
  // Some programs do on purpose what is warned of.
  setenv("LOCKSTEP_LOG", "error", /*overwrite=*/0);
  at::set_num_threads(1);
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  size_t index = begin;
  try {
    World world = World::from_env({.timeout = limits.group});
    for (; index < programs.size(); ++index) {
      say(fd, {'b', index, {}});
      const auto outcome = run_on_rank(programs[index], world);
      say(fd,
          outcome.good ? Report{'g', index, outcome.digest} : Report{'d', index, outcome.error});
    }
  } catch (const CommError& error) {
    say(fd, {'c', index, error.what()});
  } catch (const c10::Error& error) {
    say(fd, {'t', index, std::string("a raw c10::Error: ") + error.what_without_backtrace()});
  } catch (const std::exception& error) {
    say(fd, {'t', index, error.what()});
  }
  _exit(0);
}

struct Rank {
  pid_t pid = 0;
  int fd = -1;
  std::string bytes;
  std::vector<Report> reports;
  size_t at = 0;  // the program that it works on
};

// Good when every rank threw what was wanted.
Outcome judge_refusal(const std::vector<Rank>& ranks, size_t index, std::string_view wanted) {
  std::string error;
  for (size_t i = 0; i < ranks.size(); ++i) {
    std::string said = "nothing";
    for (const auto& report : ranks[i].reports) {
      if (report.index == index && report.kind != 'b') said = report.text;
    }
    if (said.find(wanted) == std::string::npos) {
      error += fmt::format("rank {} should refuse with '{}' but said: {}\n", i, wanted, said);
    }
  }
  return {.good = error.empty(), .digest = {}, .error = error};
}

// Runs programs from `begin` on, and returns how many of them are done.
size_t run_one_world(const std::vector<Program>& programs, size_t begin, const Limits& limits,
                     std::vector<Outcome>& outcomes) {
  LoopbackSocket store;
  store.listen();
  std::vector<Rank> ranks(static_cast<size_t>(programs[begin].ranks));
  for (size_t i = 0; i < ranks.size(); ++i) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
    ranks[i].pid = fork();
    if (ranks[i].pid == 0) {
      run_rank(static_cast<int>(i), store, ends[1], programs, begin, limits);
    }
    close(ends[1]);
    ranks[i].fd = ends[0];
    ranks[i].at = begin;
  }
  store.fd.reset();
  bool hung = false;
  for (size_t open = ranks.size(); open > 0;) {
    std::vector<pollfd> waits;
    for (const auto& rank : ranks) waits.push_back({.fd = rank.fd, .events = POLLIN, .revents = 0});
    const auto limit = std::chrono::milliseconds(limits.program).count();
    if (poll(waits.data(), waits.size(), static_cast<int>(limit)) == 0) {
      hung = true;
      for (const auto& rank : ranks) kill(rank.pid, SIGKILL);
    }
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (waits[i].revents == 0 || ranks[i].fd < 0) continue;
      char buffer[1 << 14];
      const ssize_t n = read(ranks[i].fd, buffer, sizeof buffer);
      if (n > 0) {
        ranks[i].bytes.append(buffer, static_cast<size_t>(n));
        for (auto& report : take_reports(ranks[i].bytes)) {
          ranks[i].at =
              std::max(ranks[i].at, report.index + (report.kind == 'g' || report.kind == 'd'));
          ranks[i].reports.push_back(std::move(report));
        }
      } else {
        close(ranks[i].fd);
        ranks[i].fd = -1;
        --open;
      }
    }
  }
  size_t done = programs.size();
  std::string ends;
  for (size_t i = 0; i < ranks.size(); ++i) {
    int status = 0;
    waitpid(ranks[i].pid, &status, 0);
    if (WIFSIGNALED(status) && !hung) {
      ends += fmt::format("rank {} ended with signal {}; ", i, WTERMSIG(status));
    }
    done = std::min(done, ranks[i].at);
  }
  // What each rank says about each program; of errors, those that are no consequence of others.
  for (size_t index = begin; index < std::min(done + 1, programs.size()); ++index) {
    Outcome outcome{.good = true, .digest = {}, .error = {}};
    std::string thrown, failed;
    for (size_t i = 0; i < ranks.size(); ++i) {
      bool over = false;
      for (const auto& report : ranks[i].reports) {
        if (report.index != index || report.kind == 'b') continue;
        over = true;
        if (report.kind == 'g') outcome.digest += report.text + " ";
        if (report.kind == 'd') outcome.error = report.text;
        if (report.kind == 't') thrown += fmt::format("rank {} threw: {}\n", i, report.text);
        if (report.kind == 'c') failed += fmt::format("rank {} failed: {}\n", i, report.text);
      }
      if (!over) outcome.good = false;
    }
    if (!thrown.empty() || !failed.empty()) outcome.error = thrown + failed;
    if (index == done && !ends.empty()) outcome.error = ends + outcome.error;
    if (!outcome.good && outcome.error.empty()) outcome.error = hung ? "hangs" : "did not end";
    outcome.good = outcome.error.empty();
    if (const auto wanted = refusal_of(programs[index]); !wanted.empty()) {
      outcome = judge_refusal(ranks, index, wanted);
    }
    outcomes.push_back(std::move(outcome));
  }
  return std::min(done + 1, programs.size()) - begin;
}

}  // namespace

std::vector<Outcome> run_in_worlds(const std::vector<Program>& programs, const Limits& limits) {
  std::vector<Outcome> outcomes;
  for (size_t begin = 0; begin < programs.size();) {
    begin += run_one_world(programs, begin, limits, outcomes);
  }
  return outcomes;
}

}  // namespace lockstep::test::training
