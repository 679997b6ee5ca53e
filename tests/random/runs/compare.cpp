#include "random/runs/compare.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>
#include <sstream>

#include "core/number.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/directory.h"
#include "lockstep/core/preemption.h"
#include "lockstep/train/run_history.h"
#include "random/runs/trained.h"
#include "support/folder.h"
#include "support/spawn.h"

namespace lockstep::test::runs {
namespace {

namespace fs = std::filesystem;

constexpr unsigned kHangs = 120;  // seconds, of trainings that take a tenth of one

std::string output_of(const std::string& folder, int64_t rank) {
  return fmt::format("{}/output.{}", folder, rank);
}

SpawnOptions transport_of(const std::string& name, int ranks) {
  SpawnOptions options{.backend = ranks == 1 ? "auto" : name};
  if (ranks == 1 || name != "hosts") return options;
  options.backend = ranks == 2 ? "tcp" : "host-then-net";
  for (int rank = 0; rank < ranks && ranks > 2; ++rank) options.hosts.push_back(rank * 2 / ranks);
  return options;
}

// The wait status of each rank.
std::vector<int> start_ranks(const Settings& run, const Settings& start, const std::string& folder,
                             int job, int restarts) {
  const auto ranks = static_cast<int>(run.with(start).number("ranks"));
  std::vector<int> all(static_cast<size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  SpawnOptions options = transport_of(run.with(start)["transport"], ranks);
  options.doomed = all;
  return spawn_bare(
      ranks,
      [&](int rank) {
        alarm(kHangs);
        const int out = open(output_of(folder, rank).c_str(), O_CREAT | O_WRONLY | O_APPEND, 0644);
        dup2(out, STDOUT_FILENO);
        dup2(out, STDERR_FILENO);
        setenv("LOCKSTEP_JOB_ID", std::to_string(job).c_str(), 1);
        setenv("TORCHELASTIC_RESTART_COUNT", std::to_string(restarts).c_str(), 1);
        int status = 1;
        try {
          status = train(run, start, folder);
        } catch (const std::exception& error) {
          fmt::print("THROWN {}\n", error.what());
        }
        std::fflush(nullptr);
        _exit(status);
      },
      options);
}

std::string text_of_status(int status) {
  return WIFSIGNALED(status) ? fmt::format("signal {}", WTERMSIG(status))
                             : fmt::format("status {}", WEXITSTATUS(status));
}

// What the ranks' statuses say against the start's interruption; empty: nothing.
std::string fault_of(const std::vector<int>& statuses, const Settings& start, bool has_happened,
                     const std::string& last_words) {
  const auto is = [](int status, int code) {
    return WIFEXITED(status) && WEXITSTATUS(status) == code;
  };
  const auto all = [&](int code) {
    return std::ranges::all_of(statuses, [&](int status) { return is(status, code); });
  };
  const bool is_infinite = start.is("how", "infinite");
  const bool is_good =
      !has_happened || start.is("how", "time") ? all(0)
      : is_infinite        ? all(1) && last_words.find(" is infinite on rank ") != last_words.npos
      : !is_failure(start) ? all(0) || all(kRequeueStatus)
                           : std::ranges::all_of(statuses, [&](int status) {
                               return is(status, 0) || is(status, 1) ||
                                      (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
                             });
  if (is_good) return {};
  std::string text = has_happened ? "interrupted, ranks ended with" : "ranks ended with";
  for (const int status : statuses) text += " " + text_of_status(status);
  return text + last_words;
}

std::string last_words(const std::string& folder, size_t ranks) {
  std::string text;
  for (size_t rank = 0; rank < ranks; ++rank) {
    std::ifstream file(output_of(folder, static_cast<int64_t>(rank)));
    std::string line, last;
    while (std::getline(file, line)) {
      if (line.starts_with("THROWN")) last = line;
    }
    if (!last.empty()) text += fmt::format("\n  rank {}: {}", rank, last);
  }
  return text;
}

void read_series(const std::string& path, Left& left) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string place, rest;
    int64_t step = 0;
    words >> place >> step;
    std::getline(words, rest);
    left.series[{place, step}].push_back(rest);
  }
}

constexpr auto kText = [](const auto& value) { return fmt::format("{}", value); };

void read_saved(const std::string& directory, Left& left) {
  const auto newest = checkpoint::newest_checkpoint(directory);
  if (!newest) return;
  const auto manifest = checkpoint::Checkpoint(*newest).manifest();
  left.saved_by = manifest.world;
  left.saved["step"] = std::to_string(manifest.step);
  for (const auto& [name, tensor] : manifest.tensors) {
    for (const auto& box : tensor.boxes) left.saved[name] += fmt::format("{:x} ", box.checksum);
  }
  for (const auto& [name, value] : manifest.values) {
    const auto* const number = std::get_if<double>(&value);
    left.saved[name] = number != nullptr ? number_text(*number) : std::visit(kText, value);
  }
}

// What is left over beside the checkpoints and what this program writes, and checkpoints that are
// not to be kept.
std::string fault_of_files(const Settings& run, const Course& course, const std::string& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    const auto is_known = [&](const std::string& known) { return name.starts_with(known); };
    if (!std::ranges::any_of(
            std::vector<std::string>{"series", "reached", "checkpoints", "log", "end.", "output."},
            is_known)) {
      return name + " is left in the folder of the run";
    }
  }
  const auto listing = checkpoint::list_checkpoints(folder + "/checkpoints");
  if (!listing.unreadable.empty()) return listing.unreadable.front() + " cannot be read";
  const auto keep = run.number("keep") + (run.has("best") ? 1 : 0);
  const bool is_one = std::ranges::none_of(
      course, [](const Settings& start) { return start.given().contains("keep"); });
  if (run.number("keep") > 0 && is_one && std::ssize(listing.checkpoints) > keep) {
    return fmt::format("{} checkpoints are kept, of {}", listing.checkpoints.size(), keep);
  }
  return {};
}

std::string without_best(const std::string& end) {
  std::istringstream lines(end);
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("best ")) kept += line + "\n";
  }
  return kept;
}

// The first line in which two texts differ.
std::string first_line_apart(const std::string& one, const std::string& other) {
  std::istringstream a(one), b(other);
  for (;;) {
    std::string line_a, line_b;
    const bool has_a(std::getline(a, line_a)), has_b(std::getline(b, line_b));
    if (!has_a && !has_b) return {};
    if (line_a != line_b) return fmt::format("'{}', but undisturbed '{}'", line_b, line_a);
  }
}

// Steps, evaluations and epochs, each with the same values, and once unless a process was killed.
std::string difference_of_series(const Left& calm, const Left& left) {
  std::set<std::pair<std::string, int64_t>> places;
  for (const auto* one : {&calm, &left}) {
    for (const auto& [place, values] : one->series) places.insert(place);
  }
  for (const auto& place : places) {
    if (place.first != "step_end" && place.first != "evaluated" && place.first != "epoch_end")
      continue;
    const std::string where = fmt::format("{} {}", place.first, place.second);
    const auto was = calm.series.find(place), is = left.series.find(place);
    if (is == left.series.end()) return where + " is missing";
    if (was == calm.series.end()) {
      if (left.was_late && place.first == "evaluated") continue;
      return where + " is none of the undisturbed run's";
    }
    for (const auto& values : is->second) {
      if (values != was->second.front()) {
        return fmt::format("{}:{}, but undisturbed{}", where, values, was->second.front());
      }
    }
    if (!left.was_killed && is->second.size() != was->second.size()) {
      return fmt::format("{} came {} times, undisturbed {}", where, is->second.size(),
                         was->second.size());
    }
  }
  return {};
}

std::string difference_of_saved(const Left& calm, const Left& left) {
  auto names = calm.saved;
  names.insert(left.saved.begin(), left.saved.end());
  for (const auto& [name, ignored] : names) {
    const auto was = calm.saved.find(name), is = left.saved.find(name);
    const std::string before = was == calm.saved.end() ? "missing" : was->second;
    const std::string now = is == left.saved.end() ? "missing" : is->second;
    // What is evaluated at the end of its time counts for the best.
    if (left.was_late && name.starts_with("trainer/best_saved")) continue;
    if (before != now) {
      return fmt::format("{} in the last checkpoint is {}, but undisturbed {}", name, now, before);
    }
  }
  return {};
}

// Whether `values` has "name=value". The log's mean over the ranks may be rounded once more.
bool says(const std::string& values, const std::string& name, double value) {
  const auto at = values.find(" " + name + "=");
  if (at == std::string::npos) return false;
  std::istringstream rest(values.substr(at + name.size() + 2));
  std::string text;
  rest >> text;
  const double said = number_from(text).value();
  return number_text(value) == text || std::abs(value - said) <= 1e-14 * std::abs(said);
}

// metrics.jsonl: no step is in two lines that count, none is missing unless a process was killed,
// and losses and metrics are those of the run.
std::string fault_of_log(const Course& course, const Left& calm, const Left& left,
                         const Settings& run, const std::string& folder) {
  const auto is_logged = [&](const Settings& start) { return run.with(start).number("log") > 0; };
  const std::string path = folder + "/log/metrics.jsonl";
  if (std::ranges::none_of(course, is_logged) || !fs::exists(path)) return {};
  const bool is_whole = !left.was_killed && std::ranges::all_of(course, is_logged);
  std::map<int64_t, train::StepReport> reports;
  std::map<int64_t, int> evaluations;
  std::istringstream lines(contents(path));
  const auto of_run = [&](const char* place, int64_t step) -> std::string {
    const auto found = calm.series.find({place, step});
    return found == calm.series.end() ? "" : found->second.front();
  };
  for (std::string line; std::getline(lines, line);) {
    double time = 0;
    std::string fault;
    const auto record = train::parse_log_line(line, time, fault);
    if (!record) {
      if (left.was_killed) continue;
      return fmt::format("the log's line '{}': {}", line, fault);
    }
    if (const auto* const begun = std::get_if<train::RunStart>(&*record)) {
      reports.erase(reports.upper_bound(begun->resumed_at), reports.end());
      evaluations.erase(evaluations.upper_bound(begun->resumed_at), evaluations.end());
    } else if (const auto* const step = std::get_if<train::StepReport>(&*record)) {
      if (!reports.emplace(step->step, *step).second)
        return fmt::format("the log has step {} twice", step->step);
      if (!says(of_run("step_end", step->step), "loss", step->loss.value_or(0))) {
        return fmt::format("the log's step {} has loss={}, but undisturbed{}", step->step,
                           number_text(step->loss.value_or(0)), of_run("step_end", step->step));
      }
    } else if (const auto* const evaluation = std::get_if<train::EvaluationReport>(&*record)) {
      if (++evaluations[evaluation->step] > 1 && !left.was_killed) {
        return fmt::format("the log has the evaluation of step {} twice", evaluation->step);
      }
      for (const auto& [name, value] : evaluation->metrics) {
        const auto values = of_run("evaluated", evaluation->step);
        if (says(values, name, value) || (left.was_late && values.empty())) continue;
        return fmt::format("the log's evaluation of step {} has {}={}, but undisturbed{}",
                           evaluation->step, name, number_text(value),
                           of_run("evaluated", evaluation->step));
      }
    }
  }
  int64_t last = 0;
  for (const auto& [step, report] : reports) {
    if (step - report.steps < last) return fmt::format("the log has step {} twice", last);
    if (is_whole && step - report.steps > last)
      return fmt::format("the log lacks step {}", last + 1);
    last = step;
  }
  if (!is_whole) return {};
  const auto history = train::read_run(path);
  const std::string end =
      history.end ? fmt::format("ended {}\nstep {}\n", history.end->outcome, history.last_step())
                  : "no end\n";
  if (!left.ends[0].starts_with(end)) return fmt::format("`lockstep report` sees {}", end);
  return {};
}

}  // namespace

Places Left::places() const {
  Places all;
  for (const auto& [place, values] : series) {
    if (place.first != "file" && place.first != "loading") {
      all[place.first].push_back(place.second);
      continue;
    }
    if (place.second == 0) continue;
    auto& calls = all[place.first];
    calls.resize(static_cast<size_t>(place.second));
    std::iota(calls.begin(), calls.end(), 1);
  }
  return all;
}

Left follow(const Settings& run, const Course& course, const std::string& folder) {
  Left left;
  std::vector<int> statuses;
  int job = 0, restarts = 0;
  for (size_t i = 0; i < course.size() && left.fault.empty(); ++i) {
    const auto& start = course[i];
    job += start.has("restart") ? 0 : 1;
    restarts = start.has("restart") ? restarts + 1 : 0;
    fs::remove(folder + "/" + kReached);
    statuses = start_ranks(run, start, folder, job, restarts);
    const bool has_happened = fs::exists(folder + "/" + kReached);
    left.happened += has_happened ? 1 : 0;
    const bool is_late = start.is("how", "time") && fs::exists(folder + "/" + kEnd + "0") &&
                         contents(folder + "/" + kEnd + "0").starts_with("ended time limit\n");
    left.was_late |= is_late;
    left.was_killed |=
        (has_happened && is_failure(start)) || (is_late && !run.with(start).has("at_end"));
    left.fault = fault_of(statuses, start, has_happened, last_words(folder, statuses.size()));
    if (!left.fault.empty()) left.fault = fmt::format("start {}: {}", i, left.fault);
    if (!is_late && std::ranges::all_of(statuses, [](int status) { return status == 0; })) break;
  }
  if (left.fault.empty() && std::ranges::any_of(statuses, [](int status) { return status != 0; })) {
    left.fault = "the last start did not end with 0" + last_words(folder, statuses.size());
  }
  if (!left.fault.empty()) return left;
  read_series(folder + "/" + kSeries, left);
  for (size_t rank = 0; rank < statuses.size(); ++rank)
    left.ends.push_back(contents(folder + "/" + kEnd + std::to_string(rank)));
  read_saved(folder + "/checkpoints", left);
  left.leftover = fault_of_files(run, course, folder);
  return left;
}

std::string difference(const Settings& run, const Course& course, const Left& calm,
                       const Left& left, const std::string& folder) {
  if (!calm.leftover.empty()) return "undisturbed: " + calm.leftover;
  if (!left.fault.empty()) return left.fault;
  if (!left.leftover.empty()) return left.leftover;
  if (auto text = difference_of_series(calm, left); !text.empty()) return text;
  for (size_t rank = 0; rank < std::min(calm.ends.size(), left.ends.size()); ++rank) {
    const auto text =
        first_line_apart(left.was_late ? without_best(calm.ends[rank]) : calm.ends[rank],
                         left.was_late ? without_best(left.ends[rank]) : left.ends[rank]);
    if (!text.empty()) return fmt::format("rank {} ends with {}", rank, text);
  }
  const bool is_divided_alike = std::ranges::none_of(course, [](const Settings& start) {
    return start.given().contains("division") || start.given().contains("replicas") ||
           start.given().contains("units");
  });
  // Then the newest is the last of those that were to come anyway.
  const bool is_saved = std::ranges::all_of(
      course, [&](const Settings& start) { return run.with(start).has("at_end"); });
  if (is_divided_alike && is_saved && calm.saved_by == left.saved_by) {
    if (auto text = difference_of_saved(calm, left); !text.empty()) return text;
  }
  return fault_of_log(course, calm, left, run, folder);
}

}  // namespace lockstep::test::runs
