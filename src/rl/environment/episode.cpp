#include "lockstep/rl/episode.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "core/hash/mix.h"

namespace lockstep::rl {
namespace {

// A user who calls tools without end says nothing to the agent.
constexpr int kMostUserCalls = 64;

Message as_calls(Role role, std::vector<ToolCall> calls) {
  return {.role = role, .calls = std::move(calls)};
}

}  // namespace

Episode::Episode(Environment& environment, UserSimulator& user, Limits limits)
    : environment_(&environment), user_(&user), limits_(limits) {
  if (std::min({limits_.max_turns, limits_.max_errors, limits_.max_new_tokens, limits_.context}) <
      1) {
    throw ConfigError(fmt::format(
        "[rl] Episode: max_turns {}, max_errors {}, max_new_tokens {}, context {}: each must be at "
        "least 1",
        limits_.max_turns, limits_.max_errors, limits_.max_new_tokens, limits_.context));
  }
}

void Episode::fail(const EnvironmentError& error) {
  why_ = End::EnvError;
  is_evaluated_ = true;
  reward_ = {.note = error.what()};
}

std::vector<Message> Episode::begin(const TaskKey& task, uint64_t key) {
  log_.clear();
  scene_ = {.task = task};
  key_ = key;
  why_ = End::None;
  turns_ = calls_ = errors_ = 0;
  is_evaluated_ = false;
  reward_ = {};
  try {
    scene_ = environment_->reset(task, key);
    scene_.task = task;
    auto seen = scene_.history;
    // A history may end with what the agent has yet to answer.
    if (seen.empty() || seen.back().role == Role::Assistant) {
      auto said = user_speaks();
      std::move(said.begin(), said.end(), std::back_inserter(seen));
    }
    return seen;
  } catch (const EnvironmentError& error) {
    fail(error);
    return {};
  }
}

std::vector<Message> Episode::agent_says(std::string_view text) {
  if (over()) {
    throw Error(fmt::format("[rl] Episode::agent_says: {} is over ({}); begin() another",
                            name_of(scene_.task), name_of(why_)));
  }
  ++turns_;
  std::vector<Message> seen;
  try {
    seen = respond(text);
  } catch (const EnvironmentError& error) {
    fail(error);
  }
  if (!over() && errors_ >= limits_.max_errors) why_ = End::MaxErrors;
  if (!over() && turns_ >= limits_.max_turns) why_ = End::MaxTurns;
  if (over()) seen.clear();
  return seen;
}

std::vector<Message> Episode::respond(std::string_view text) {
  auto turn = parse_agent_text(text, limits_.calls);
  if (!turn.fault.empty()) return malformed(text, turn.fault);
  if (turn.calls.empty()) {
    log_.push_back({.role = Role::Assistant, .content = std::move(turn.text)});
    return user_speaks();
  }
  const bool stops = !scene_.stop_tool.empty() &&
                     std::any_of(turn.calls.begin(), turn.calls.end(),
                                 [&](const auto& call) { return call.name == scene_.stop_tool; });
  if (!stops) return call_tools(std::move(turn.calls));
  log_.push_back({.role = Role::Assistant, .content = std::string(kStop)});
  why_ = End::AgentStop;
  return {};
}

std::vector<Message> Episode::malformed(std::string_view text, const std::string& fault) {
  log_.push_back({.role = Role::Assistant, .content = std::string(text), .error = true});
  ++errors_;
  if (limits_.malformed == Malformed::Ends) {
    why_ = End::BadCall;
    return {};
  }
  log_.push_back(
      {.role = Role::Tool, .content = "Error: malformed tool call: " + fault, .error = true});
  return {log_.back()};
}

std::vector<Message> Episode::call_tools(std::vector<ToolCall> calls) {
  for (auto& call : calls) call.id = fmt::format("c{}", calls_++);
  log_.push_back(as_calls(Role::Assistant, calls));
  std::vector<Message> seen;
  for (const auto& call : calls) {
    seen.push_back(answer_to(call));
    errors_ += seen.back().error;
  }
  return seen;
}

const Message& Episode::answer_to(const ToolCall& call) {
  log_.push_back(environment_->call(call));
  Message& answer = log_.back();
  answer.role = Role::Tool;
  answer.call_id = call.id;
  answer.by = call.by;
  return answer;
}

std::vector<Message> Episode::user_speaks() {
  for (int round = 0; round < kMostUserCalls; ++round) {
    // Numbers of this turn alone, independent of what was drawn before.
    auto said = user_->next(scene_, log_, mix(key_ ^ log_.size()));
    for (auto& call : said.calls) {
      call.id = fmt::format("u{}.{}", log_.size(), &call - said.calls.data());
      call.by = Party::User;
    }
    log_.push_back(said);
    if (said.calls.empty()) {
      if (ends_conversation(said.content)) why_ = End::UserStop;
      return {said};
    }
    for (const auto& call : said.calls) answer_to(call);
  }
  throw EnvironmentError(fmt::format("[rl] Episode: the user of {} called tools {} times in a row",
                                     name_of(scene_.task), kMostUserCalls));
}

// A sum with NaN is NaN, and no file of results can hold one.
void Episode::check_finite() const {
  const auto check = [&](std::string_view what, double value) {
    if (std::isfinite(value)) return;
    throw EnvironmentError(fmt::format("[rl] Episode: the environment of {} gave {} {}",
                                       name_of(scene_.task), what, value));
  };
  check("a reward of", reward_.value);
  for (const auto& [name, value] : reward_.parts) check("a reward with " + name + " =", value);
}

// Trials count as solved from 1 on, and scores of several domains are compared.
void Episode::check_range() {
  constexpr double kRounding = 1e-6;  // of an environment's own sum, which ten times 0.1 is not 1
  for (const double end : {0.0, 1.0}) {
    if (std::abs(reward_.value - end) <= kRounding) reward_.value = end;
  }
  if (reward_.value >= 0 && reward_.value <= 1) return;
  throw ConfigError(
      fmt::format("[rl] Episode: the environment of {} gave a reward of {}, which is not within "
                  "[0, 1]: scale it",
                  name_of(scene_.task), reward_.value));
}

void Episode::stop(End why) {
  if (!over()) why_ = why;
}

const Reward& Episode::reward() {
  if (!over()) {
    throw Error(fmt::format("[rl] Episode::reward: {} is not over", name_of(scene_.task)));
  }
  if (is_evaluated_) return reward_;
  try {
    reward_ = environment_->evaluate(log_, why_);
    check_finite();
    check_range();
    is_evaluated_ = true;
  } catch (const EnvironmentError& error) {
    fail(error);
  }
  return reward_;
}

}  // namespace lockstep::rl
