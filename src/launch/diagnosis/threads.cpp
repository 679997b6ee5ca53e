#include "launch/diagnosis/threads.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <utility>
#include <vector>

#include "core/process/stat.h"

namespace lockstep::launch {
namespace {

constexpr size_t kMostThreads = 8;  // that are not alike

// "in do_poll" of "do_poll.constprop.0"; "0" is a thread that does not wait, or a kernel that does
// not tell.
std::string what_it_does(pid_t pid, const ProcessStat& thread) {
  if (thread.state == 'R') return "runs";
  std::ifstream file(fmt::format("/proc/{}/task/{}/wchan", pid, thread.pid));
  std::string function;
  std::getline(file, function);
  function.resize(std::min(function.size(), function.find('.')));
  if (function.empty() || function == "0") return fmt::format("in state {}", thread.state);
  return "in " + function;
}

}  // namespace

std::string waits_of_threads(pid_t pid) {
  std::vector<std::pair<std::string, int>> counts;
  for (const ProcessStat& thread : thread_stats(pid)) {
    const std::string text = fmt::format("{} {}", thread.name, what_it_does(pid, thread));
    const auto alike = std::ranges::find(counts, text, &std::pair<std::string, int>::first);
    if (alike != counts.end()) {
      ++alike->second;
    } else {
      counts.emplace_back(text, 1);
    }
  }
  std::vector<std::string> texts;
  for (const auto& [text, count] : counts) {
    if (texts.size() == kMostThreads) {
      texts.emplace_back("...");
      break;
    }
    texts.push_back(count == 1 ? text : fmt::format("{} ({})", text, count));
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

}  // namespace lockstep::launch
