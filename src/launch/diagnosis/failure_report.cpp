#include "launch/diagnosis/failure_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "launch/diagnosis/failure_summary.h"
#include "launch/diagnosis/stacks.h"

namespace lockstep::launch {
namespace {

// Seconds before the failure; negative after it.
std::string relative(uint64_t at_ns, uint64_t failed_ns) {
  return fmt::format("{:+.6f} s",
                     (static_cast<double>(at_ns) - static_cast<double>(failed_ns)) * 1e-9);
}

void add_operations(std::string& page, const Seen& seen, uint64_t failed_ns) {
  if (seen.log.last.empty()) return;
  page += fmt::format("  last {} of {} calls (start, end; 0 is the first failure)\n",
                      seen.log.last.size(), seen.log.calls);
  for (const flight::Operation& operation : seen.log.last) {
    page += fmt::format("    {:>18}  {:>18}  {}\n", relative(operation.start_ns, failed_ns),
                        operation.end_ns == 0 ? "not over" : relative(operation.end_ns, failed_ns),
                        operation.text());
  }
}

void add_stack(std::string& page, const flight::Stack& stack, uint64_t failed_ns) {
  page += fmt::format("  {}: stack\n", relative(stack.at_ns, failed_ns));
  int depth = 0;
  for (const std::string& frame : StackNames({&stack}).frames(stack)) {
    page += fmt::format("    #{:<2} {}\n", depth++, frame);
  }
}

void add_words(std::string& page, const std::string& words) {
  if (words.empty()) return;
  page += "  last on stderr\n";
  for (size_t begin = 0; begin < words.size();) {
    const size_t end = std::min(words.find('\n', begin), words.size());
    page += fmt::format("    | {}\n", words.substr(begin, end - begin));
    begin = end + 1;
  }
}

}  // namespace

std::string failure_report(const Outcome& outcome, const std::map<int, std::string>& last_words) {
  std::string page;
  for (const std::string& line : report(outcome)) page += line + "\n";
  for (const Seen& seen : outcome.seen) {
    page += fmt::format("\nrank {}\n", seen.rank);
    if (seen.log.failure) {
      page += fmt::format("  {}: {}\n", relative(seen.log.failure->at_ns, outcome.failed_ns),
                          seen.log.failure->text);
    }
    if (seen.log.comparison) {
      page += fmt::format("  {}: compared with the other ranks, {}\n",
                          relative(seen.log.comparison->at_ns, outcome.failed_ns),
                          seen.log.comparison->text);
    }
    if (const auto* stack = outcome.stack_of(seen)) add_stack(page, *stack, outcome.failed_ns);
    add_operations(page, seen, outcome.failed_ns);
    const auto words = last_words.find(seen.rank);
    if (words != last_words.end()) add_words(page, words->second);
  }
  return page;
}

}  // namespace lockstep::launch
