#include "rl/run/trajectories.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "lockstep/core/log.h"
#include "rl/run/policy.h"

namespace lockstep::rl {
namespace {

using Json = nlohmann::ordered_json;

Json message_json(const Message& message) {
  Json out{{"role", name_of(message.role)}, {"content", message.content}};
  if (!message.calls.empty()) {
    out["calls"] = Json::array();
    for (const auto& call : message.calls) {
      out["calls"].push_back({{"name", call.name}, {"arguments", call.arguments}});
    }
  }
  if (message.error) out["error"] = true;
  return out;
}

// `advantage`: what its reward counts for, where it is learnt from by GRPO.
std::string line_of(const Played& played, const RolloutPlan& plan, const Unit& unit, int64_t number,
                    std::optional<double> advantage, bool with_tokens) {
  const bool learns = unit.kind == Unit::Kind::Learn;
  Json out{{"phase", learns ? "learn" : "eval"}};
  // Of an evaluation: the last stage that is over, 0 before any, and how many iterations it had.
  out["stage"] = learns ? unit.stage + 1 : unit.stage;
  out["iteration"] = learns ? unit.number : unit.iterations;
  out["row"] = unit.stage;
  out["domain"] = played.planned.task.domain;
  out["split"] = played.planned.task.split;
  out["id"] = played.planned.task.id;
  out["sample"] = number % plan.group_size;
  out["lane"] = plan.lane_of(number);
  out["key"] = played.planned.key;
  out["messages"] = Json::array();
  for (const auto& message : played.log) out["messages"].push_back(message_json(message));
  if (with_tokens) {
    out["token_ids"] = played.tokens.ids;
    out["mask"] = played.tokens.own;
  }
  out["reward"] = played.reward.value;
  out["parts"] = played.reward.parts;
  out["end"] = name_of(played.end);
  out["turns"] = played.turns;
  out["tokens"] = played.own_tokens();
  if (advantage) out["advantage"] = *advantage;
  return out.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

// Returns errno, or 0. What comes after `at` is gone either way, as far as the file system lets it.
int write_at(const std::string& path, int64_t at, std::string_view bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) return errno;
  int64_t end = at;
  int error = 0;
  while (!bytes.empty() && error == 0) {
    const ssize_t n = pwrite(fd, bytes.data(), bytes.size(), end);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) error = errno;
    if (n < 0) break;
    bytes.remove_prefix(static_cast<size_t>(n));
    end += n;
  }
  const bool is_cut = ftruncate(fd, error == 0 ? end : at) == 0;
  if (error == 0 && !is_cut) error = errno;
  if (close(fd) != 0 && error == 0) error = errno;
  return error;
}

}  // namespace

std::vector<std::string> trajectory_lines(const Rollout& rollout, const RolloutPlan& plan,
                                          const Unit& unit, const RunOptions& options,
                                          const comm::Group& group) {
  const bool learns = unit.kind == Unit::Kind::Learn;
  const bool all = learns || options.log_all;
  Agreed agreed;
  if (learns && options.use_grpo) agreed = agreed_on(rollout, options);
  std::string mine;
  for (size_t lane = 0; lane < rollout.numbers.size(); ++lane) {
    for (size_t i = 0; i < rollout.numbers[lane].size(); ++i) {
      const auto number = static_cast<int64_t>(rollout.numbers[lane][i]);
      if (!all && number % plan.group_size != 0) continue;
      const auto advantage = agreed.advantages.empty()
                                 ? std::nullopt
                                 : std::optional(agreed.advantages[static_cast<size_t>(number)]);
      mine += fmt::format("{:08} ", number) +
              line_of(rollout.episodes[lane][i], plan, unit, number, advantage, options.log_tokens);
    }
  }
  std::vector<std::string> lines;
  for (const auto& text : group.gather_bytes(mine, 0, {.label = "trajectories"})) {
    for (size_t at = 0; at < text.size();) {
      const size_t end = text.find('\n', at);
      lines.push_back(text.substr(at, end - at + 1));
      at = end + 1;
    }
  }
  std::sort(lines.begin(), lines.end());
  for (auto& line : lines) line.erase(0, 9);  // its number
  return lines;
}

void TrajectoryFile::cut(int64_t lines) {
  std::ifstream in(path_, std::ios::binary);
  std::string line;
  lines_ = bytes_ = 0;
  while (lines_ < lines && std::getline(in, line) && !in.eof()) {
    bytes_ += static_cast<int64_t>(line.size()) + 1;
    ++lines_;
  }
  if (lines_ < lines) {
    log::warn(fmt::format(
        "[three_domain] {} has {} whole lines; the checkpoint was made when it had {}: the run "
        "continues without the others",
        path_, lines_, lines));
  }
  append({});
}

void TrajectoryFile::append(const std::vector<std::string>& lines) {
  std::string all;
  for (const auto& line : lines) all += line;
  const auto count = static_cast<int64_t>(lines.size());
  const int error = write_at(path_, bytes_, all);
  if (error == 0) {
    lines_ += count;
    bytes_ += static_cast<int64_t>(all.size());
    return;
  }
  if (lost_ == 0 && count > 0) {
    log::warn(fmt::format("[three_domain] {} takes no more lines ({}); training continues", path_,
                          std::strerror(error)));
  }
  lost_ += count;
}

}  // namespace lockstep::rl
