#include "random/group/worlds.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "random/group/run.h"
#include "support/spawn.h"

namespace lockstep::random_group {
namespace {

// What a rank leaves to be read by the parent, however it ends.
struct Report {
  enum class End : int { Killed, Well, Difference, Error };
  End end;
  size_t program;
  char text[3000];

  void say(End how, const char* what) {
    std::strncpy(text, what, sizeof text - 1);
    end = how;
  }
};

// Memory that ranks share with the process that forked them.
class Reports {
 public:
  explicit Reports(int count)
      : bytes_(count * sizeof(Report)),
        reports_(static_cast<Report*>(
            mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~Reports() { munmap(reports_, bytes_); }
  Reports(const Reports&) = delete;
  Report& operator[](int rank) { return reports_[rank]; }

 private:
  size_t bytes_;
  Report* reports_;
};

struct Range {
  size_t begin, end;
};

void run_all(const Group& group, at::Device device, const std::vector<Program>& programs,
             Range range, std::chrono::milliseconds deadline, Report& report) {
  for (report.program = range.begin; report.program < range.end; ++report.program) {
    // For what hangs outside of Group's own deadline.
    alarm(static_cast<unsigned>(4 * deadline.count() / 1000 + 30));
    try {
      run(group, device, programs[report.program], deadline);
    } catch (const Difference& difference) {
      return report.say(Report::End::Difference, difference.what());
    } catch (const std::exception& error) {
      return report.say(Report::End::Error, error.what());
    }
  }
  report.end = Report::End::Well;
}

std::string ended(int status) {
  return WIFSIGNALED(status) ? fmt::format("killed by signal {}", WTERMSIG(status))
                             : fmt::format("exited with {}", WEXITSTATUS(status));
}

}  // namespace

std::string Setting::text() const {
  std::string text = fmt::format("--backend {} --ranks {}", backend, ranks);
  if (in_threads) text += " --in-threads";
  return hosts.empty() ? text : fmt::format("{} --hosts {}", text, fmt::join(hosts, ","));
}

Traits Setting::traits() const {
  return {.tree_order = backend != "python" && backend != "nccl",
          .bitwise = backend != "nccl",
          .drops = true,
          .polls = true,
          .any_order = true,
          .splits = backend != "python"};
}

std::optional<Failure> run_in_world(const Setting& setting, const std::vector<Program>& programs,
                                    std::chrono::milliseconds deadline) {
  const std::vector<int>& ranks = programs.front().ranks;
  const auto size = static_cast<int>(ranks.size());
  const bool in_threads = setting.in_threads && programs.size() > 1;
  const size_t half = in_threads ? programs.size() / 2 : programs.size();
  Reports reports(2 * size);  // each rank's of both threads
  test::SpawnOptions options{.backend = setting.backend, .timeout = deadline};
  for (int rank = 0; rank < size; ++rank) {
    options.doomed.push_back(rank);  // what they say is read here
    if (!setting.hosts.empty()) options.hosts.push_back(setting.hosts[ranks[rank]]);
  }
  const bool python = setting.backend == "python";
  if (python) options.backend = "gloo";
  // With fewer ranks there may be one host left, or one rank a host.
  if (setting.backend == "host-then-net" || setting.backend == "solo" || size == 1)
    options.backend = "auto";
  const std::vector<int> statuses = test::spawn_bare(
      size,
      [&](int rank) {
        try {
          const World world = World::from_env({.timeout = deadline, .python_peers = python});
          const auto run_range = [&](const Group& group, Range range, Report& report) {
            run_all(group, world.device(), programs, range, deadline, report);
          };
          if (!in_threads) return run_range(world.group(), {0, half}, reports[rank]);
          const Group second = world.group().split(0);
          std::thread other([&] {
            run_range(second, {half, programs.size()}, reports[size + rank]);
          });
          run_range(world.group(), {0, half}, reports[rank]);
          other.join();
        } catch (const std::exception& error) {
          reports[rank].say(Report::End::Error, error.what());
        }
      },
      options);
  std::optional<Failure> failure;
  bool differs = false;
  for (int index = 0; index < (in_threads ? 2 : 1) * size; ++index) {
    const Report& report = reports[index];
    const int rank = index % size;
    if (report.end == Report::End::Well) continue;
    // Where results differ, the other ranks' errors follow from that.
    const bool is_difference = report.end == Report::End::Difference;
    if (!failure) failure = Failure{report.program, {}};
    if (is_difference && !differs) failure->program = report.program;
    if (!differs && !is_difference) failure->program = std::min(failure->program, report.program);
    differs = differs || is_difference;
    const std::string text =
        report.end == Report::End::Killed ? ended(statuses[rank]) : report.text;
    failure->text += fmt::format("  rank {}, program {}: {}\n", rank, report.program, text);
    failure->late = failure->late || text.find("timed out") != std::string::npos ||
                    text.find("deadline") != std::string::npos ||
                    text.find("never completed") != std::string::npos;
  }
  return failure;
}

}  // namespace lockstep::random_group
