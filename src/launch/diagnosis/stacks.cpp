#include "launch/diagnosis/stacks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <set>
#include <string_view>

#include "launch/diagnosis/symbols.h"
#include "launch/process/descendants.h"

namespace lockstep::launch {
namespace {

constexpr size_t kInner = 5, kOuter = 5;  // frames of a chain
constexpr size_t kLongestShown = 80;

// Whether the main thread of a process would handle the signal: the rank may be a child of the
// process that was started, or have executed another program, which the signal would end.
bool listens(pid_t pid, int signal) {
  std::ifstream status(fmt::format("/proc/{}/task/{}/status", pid, pid));
  uint64_t blocked = 0, caught = 0;
  for (std::string line; std::getline(status, line);) {
    const std::string_view text = line;
    if (text.starts_with("SigBlk:")) blocked = std::strtoull(line.c_str() + 7, nullptr, 16);
    if (text.starts_with("SigCgt:")) caught = std::strtoull(line.c_str() + 7, nullptr, 16);
  }
  const uint64_t bit = uint64_t{1} << (signal - 1);
  return (caught & bit) != 0 && (blocked & bit) == 0;
}

// Whether the process is in a state in which a signal is handled at once.
bool runs(pid_t pid) {
  const char state = process_state(pid);
  return state == 'R' || state == 'S';
}

std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// "fault_trainer+0x1234"
std::string place_of(const flight::Frame& frame) {
  return fmt::format("{}+{:#x}", base_name(frame.module), frame.offset);
}

// "lockstep::comm::Work::wait" of "lockstep::comm::Work::wait()"
std::string without_arguments(std::string name) {
  constexpr std::string_view kAnonymous = "(anonymous namespace)::";
  for (size_t at = 0; (at = name.find(kAnonymous, at)) != std::string::npos;) {
    name.erase(at, kAnonymous.size());
  }
  int depth = 0;
  for (size_t i = 0; i < name.size(); ++i) {
    depth += name[i] == '<' ? 1 : name[i] == '>' ? -1 : 0;
    if (name[i] == '(' && depth <= 0 && i > 0) {
      name.resize(i);
      break;
    }
  }
  return name.size() > kLongestShown ? name.substr(0, kLongestShown) + "..." : name;
}

}  // namespace

void ask_for_stacks(const flight::Segment& flight, const std::map<int, pid_t>& pids,
                    std::chrono::milliseconds limit) {
  std::map<int, uint32_t> asked;  // the number of each one's last stack
  for (const auto& [local, pid] : pids) {
    if (!flight.listens(local) || !runs(pid) || !listens(pid, flight::question())) continue;
    if (tracer_of(pid) != 0) continue;
    asked[local] = flight.stacks_told(local);
    syscall(SYS_tgkill, pid, pid, flight::question());
  }
  const auto until = std::chrono::steady_clock::now() + limit;
  while (!asked.empty() && std::chrono::steady_clock::now() < until) {
    std::erase_if(asked, [&](const auto& one) {
      return flight.stacks_told(one.first) != one.second || !runs(pids.at(one.first));
    });
    if (!asked.empty()) poll(nullptr, 0, 1);
  }
}

StackNames::StackNames(const std::vector<const flight::Stack*>& stacks) {
  std::map<std::string, std::set<uint64_t>> wanted;
  for (const flight::Stack* stack : stacks) {
    for (const flight::Frame& frame : stack->frames) wanted[frame.module].insert(frame.offset);
  }
  for (const auto& [module, offsets] : wanted) {
    const std::vector<uint64_t> addresses(offsets.begin(), offsets.end());
    const auto found = functions_at(module, addresses);
    for (size_t i = 0; i < found.size(); ++i) names_[{module, addresses[i]}] = found[i];
  }
}

std::vector<std::string> StackNames::frames(const flight::Stack& stack) const {
  std::vector<std::string> lines;
  for (const flight::Frame& frame : stack.frames) {
    const std::string& name = names_.at({frame.module, frame.offset});
    lines.push_back(name.empty() ? place_of(frame) : fmt::format("{} ({})", name, place_of(frame)));
    if (name == "main") break;
  }
  return lines;
}

std::string StackNames::chain(const flight::Stack& stack) const {
  std::vector<std::string> names;
  for (const flight::Frame& frame : stack.frames) {
    const std::string& name = names_.at({frame.module, frame.offset});
    names.push_back(name.empty() ? place_of(frame) : without_arguments(name));
    if (name == "main") break;
  }
  if (names.size() > kInner + kOuter + 1) {
    names.erase(names.begin() + kInner, names.end() - kOuter);
    names.insert(names.begin() + kInner, "...");
  }
  return fmt::format("{}", fmt::join(names, " < "));
}

}  // namespace lockstep::launch
