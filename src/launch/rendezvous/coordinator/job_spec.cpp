#include "launch/rendezvous/coordinator/job_spec.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "core/security/token.h"

namespace lockstep::launch {
namespace {

constexpr size_t kMostCommand = 1000;  // that is sent
constexpr size_t kMostShown = 100;
constexpr size_t kContext = 30;  // before the first difference

std::string in_seconds(Time time) {
  return fmt::format("{:g}", std::chrono::duration<double>(time).count());
}

// As much as there is room for, from shortly before the first byte in which it differs.
std::string part_of(const std::string& command, const std::string& other) {
  const auto differs = std::mismatch(command.begin(), command.end(), other.begin(), other.end());
  const auto same = static_cast<size_t>(differs.first - command.begin());
  const bool is_short = std::max(command.size(), other.size()) <= kMostShown;
  const size_t begin = is_short || same < kContext ? 0 : same - kContext;
  const std::string part = command.substr(begin, kMostShown);
  return fmt::format("{}{}{}", begin > 0 ? "..." : "", part,
                     begin + part.size() < command.size() ? "..." : "");
}

}  // namespace

void set_command(JobSpec& job_spec, const std::vector<std::string>& command) {
  if (command.empty()) return;
  std::vector<std::string> words = command;
  words.front() = words.front().substr(words.front().rfind('/') + 1);
  Digest all{};
  for (const std::string& word : words) all = hmac("command", {text_of(all), word});
  job_spec.command_hash = 1;  // never 0
  for (size_t i = 0; i < 7; ++i) job_spec.command_hash = job_spec.command_hash << 8 | all[i];
  job_spec.command = fmt::format("{}", fmt::join(words, " ")).substr(0, kMostCommand);
}

std::string difference(const JobSpec& job_spec, const JobSpec& other) {
  std::vector<std::string> parts;
  if (job_spec.min_nodes != other.min_nodes || job_spec.max_nodes != other.max_nodes) {
    parts.push_back(fmt::format("--nnodes {}:{}", job_spec.min_nodes, job_spec.max_nodes));
  }
  if (job_spec.max_restarts != other.max_restarts) {
    parts.push_back(fmt::format("--max-restarts {}", job_spec.max_restarts));
  }
  if (job_spec.grace != other.grace) {
    parts.push_back(job_spec.grace ? "--grace " + in_seconds(*job_spec.grace) : "no --grace");
  }
  if (job_spec.lease != other.lease) {
    parts.push_back("--rdzv-conf heartbeat_timeout=" + in_seconds(job_spec.lease));
  }
  if ((job_spec.command_hash == 0) != (other.command_hash == 0)) {
    parts.push_back(fmt::format("--rdzv-conf same_command={:d}", job_spec.command_hash != 0));
  } else if (job_spec.command_hash != other.command_hash) {
    parts.push_back(fmt::format("the command '{}'", part_of(job_spec.command, other.command)));
  }
  return fmt::format("{}", fmt::join(parts, " and "));
}

}  // namespace lockstep::launch
