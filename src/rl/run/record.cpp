#include "rl/run/record.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/rl/episode.h"
#include "rl/policy/agreed.h"
#include "rl/run/policy.h"
#include "rl/run/setup.h"

namespace lockstep::rl {
namespace {

using Json = nlohmann::ordered_json;

// Parts of rewards that say whether the customer was told what he had to be told: the embedded
// domains' and tau2's, whose tasks have it where there is something to be told.
constexpr const char* kTold[] = {"told", "COMMUNICATE"};

bool is_of_agent(const Message& message) { return message.role == Role::Assistant; }

EvaluatedTrial trial_of(const Played& played) {
  EvaluatedTrial out{.reward = played.reward.value};
  std::map<std::string, std::string> names;  // of the agent's calls, by id
  for (const auto& message : played.log) {
    // A malformed one was meant as a call.
    if (is_of_agent(message) && message.error) ++out.calls;
    if (is_of_agent(message)) {
      for (const auto& call : message.calls) {
        out.called.push_back(call.name);
        names[call.id] = call.name;
      }
      out.calls += static_cast<int64_t>(message.calls.size());
    }
    const bool answers = message.role == Role::Tool && !message.call_id.empty();
    if (!answers || message.by != Party::Agent) continue;
    if (!message.error) ++out.good_calls;
    if (message.error) out.failed.push_back(names[message.call_id]);
  }
  for (const char* name : kTold) {
    const auto part = played.reward.parts.find(name);
    if (part == played.reward.parts.end()) continue;
    out.told = out.told.value_or(false) || part->second >= 1;
  }
  return out;
}

std::vector<std::string> names_of_agents(const std::vector<ToolCall>& calls) {
  std::vector<std::string> out;
  for (const auto& call : calls) {
    if (call.by == Party::Agent) out.push_back(call.name);
  }
  return out;
}

bool has_argument(const std::vector<ToolCall>& calls) {
  return std::any_of(calls.begin(), calls.end(), [](const ToolCall& call) {
    const auto arguments = Json::parse(call.arguments, nullptr, false);
    return call.by == Party::Agent && arguments.is_object() && arguments.size() > 1;
  });
}

std::map<std::string, double> by_domain(const Curriculum& curriculum, size_t count,
                                        const std::vector<double>& values) {
  std::map<std::string, double> out;
  for (size_t j = 0; j < std::min(count, values.size()); ++j) {
    out[curriculum.columns[j].domain] = values[j];
  }
  return out;
}

}  // namespace

double scripted(const Course& course, const RolloutPlan& plan, const Limits& limits,
                const comm::Group& group,
                const std::function<std::vector<std::string>(const Planned&)>& lines) {
  Json mine{{"rewards", Json::array()}, {"died", 0}, {"why", ""}};
  const auto play = [&](const Planned& planned) {
    const Arena& arena = course.arenas.at(planned.task.domain);
    const auto environment = arena.domain->make();
    const auto user = arena.make_user();
    Episode episode(*environment, *user, limits);
    episode.begin(planned.task, planned.key);
    for (const auto& line : lines(planned)) {
      if (!episode.over()) episode.agent_says(line);
    }
    episode.stop(End::AgentStop);
    mine["rewards"].push_back(episode.reward().value);
    if (episode.why() != End::EnvError) return;
    mine["died"] = mine["died"].get<int64_t>() + 1;
    mine["why"] = episode.reward().note;
  };
  const auto ranks = static_cast<size_t>(group.size());
  const auto play_own = [&] {
    for (auto i = static_cast<size_t>(group.rank()); i < plan.episodes.size(); i += ranks)
      play(plan.episodes[i]);
  };
  agree_on(group, play_own, plan.timeout);
  std::vector<Json> of_ranks;
  const std::string text = mine.dump(-1, ' ', false, Json::error_handler_t::replace);
  for (const auto& each : group.all_gather_bytes(text, {.label = "baselines"}))
    of_ranks.push_back(Json::parse(each));
  double sum = 0;
  for (size_t i = 0; i < plan.episodes.size(); ++i)
    sum += of_ranks[i % ranks]["rewards"][i / ranks].get<double>();
  int64_t died = 0;
  std::string why;  // the last of some rank's
  for (const auto& each : of_ranks) {
    died += each["died"].get<int64_t>();
    if (each["died"] != 0) why = each["why"];
  }
  if (died > 0 && group.rank() == 0) {
    log::warn(
        fmt::format("[three_domain] in a baseline the environments of {} of {} episodes died, "
                    "which count with reward 0; the last one: {}",
                    died, plan.episodes.size(), why));
  }
  return plan.episodes.empty() ? 0 : sum / static_cast<double>(plan.episodes.size());
}

void check_environments(const Rollout& rollout, const std::string& why, const comm::Group& group) {
  const auto died = std::count_if(rollout.outcomes.begin(), rollout.outcomes.end(), is_lost);
  const auto count = static_cast<int64_t>(rollout.outcomes.size());
  if (died * 5 <= count) return;
  const auto of_ranks = group.all_gather_bytes(why, {.label = "environments"});
  const auto first = std::find_if(of_ranks.begin(), of_ranks.end(),
                                  [](const auto& of_rank) { return !of_rank.empty(); });
  throw Error(
      fmt::format("[three_domain] the environments of {} of {} episodes died, the last one: {}",
                  died, count, first == of_ranks.end() ? "said nothing" : *first));
}

GoldCalls gold_of(const Course& course, const Curriculum& curriculum) {
  GoldCalls out;
  for (const auto& column : curriculum.columns) {
    const auto& domain = *course.arenas.at(column.domain).domain;
    for (const auto& key : column.learning) out[key] = domain.gold_calls(key);
    for (const auto& key : column.evaluation) out[key] = domain.gold_calls(key);
  }
  return out;
}

Cell cell_of(const Rollout& rollout, const comm::Group& group) {
  Json mine = Json::array();
  for (size_t lane = 0; lane < rollout.numbers.size(); ++lane) {
    for (size_t i = 0; i < rollout.numbers[lane].size(); ++i) {
      mine.push_back({rollout.numbers[lane][i], to_json(trial_of(rollout.episodes[lane][i]))});
    }
  }
  Cell out;
  out.trials.resize(rollout.outcomes.size());
  const std::string text = mine.dump(-1, ' ', false, Json::error_handler_t::replace);
  for (const auto& of_rank : group.all_gather_bytes(text, {.label = "trials"})) {
    for (const auto& one : Json::parse(of_rank)) {
      out.trials.at(one[0].get<size_t>()) = trial_from_json(one[1].get<std::string>());
    }
  }
  return out;
}

std::optional<double> own_reward(const Rollout& rollout, const RolloutPlan& plan,
                                 const StagePlan& stage) {
  const bool has_all = stage.domain == "joint";
  double sum = 0, count = 0;
  for (size_t i = 0; i < plan.episodes.size(); ++i) {
    if (!has_all && plan.episodes[i].task.domain != stage.domain) continue;
    if (is_lost(rollout.outcomes[i])) continue;
    sum += rollout.outcomes[i].reward;
    ++count;
  }
  return count == 0 ? std::nullopt : std::optional(sum / count);
}

std::map<std::string, double> figures_of(const Rollout& rollout, const Learnt& learnt,
                                         int64_t stage) {
  const auto lost = std::count_if(rollout.outcomes.begin(), rollout.outcomes.end(), is_lost);
  const auto count = static_cast<double>(std::ssize(rollout.outcomes) - lost);
  std::map<std::string, double> values{{"reward", learnt.reward},
                                       {"equal groups", learnt.equal_share},
                                       {"kl", learnt.kl},
                                       {"entropy", learnt.entropy},
                                       {"clipped low", learnt.clipped_low},
                                       {"clipped high", learnt.clipped_high},
                                       {"stage", static_cast<double>(stage + 1)}};
  double longest = 0;
  for (const auto& outcome : rollout.outcomes) {
    if (is_lost(outcome)) continue;
    values["reward/state"] += outcome.state / count;
    values["reward/told"] += outcome.told / count;
    values["reward/policy"] += outcome.policy / count;
    values["turns"] += outcome.turns / count;
    values["tokens"] += outcome.own_tokens / count;
    longest = std::max(longest, outcome.own_tokens);
  }
  values["longest"] = longest;
  return values;
}

std::string keys_of(const Rollout& rollout, const RolloutPlan& plan, const Unit& unit,
                    const RunOptions& options, const Learnt& learnt, int ranks) {
  const auto means = figures_of(rollout, learnt, unit.stage);
  const Agreed agreed = agreed_on(rollout, options);
  double squares = 0, tokens = 0, count = 0;
  int64_t dropped = 0;
  Json ends = Json::object();
  std::vector<double> of_lanes(static_cast<size_t>(plan.lanes), 0), of_ranks;
  for (size_t i = 0; i < rollout.outcomes.size(); ++i) {
    const auto& one = rollout.outcomes[i];
    const auto number = static_cast<int64_t>(i);
    of_lanes[static_cast<size_t>(plan.lane_of(number))] += one.seconds;
    if (number % plan.group_size == 0) {
      const auto first = agreed.kept.begin() + number;
      if (std::all_of(first, first + plan.group_size, [](auto kept) { return kept == 0; })) {
        ++dropped;
      }
    }
    const std::string end(name_of(static_cast<End>(one.end)));
    ends[end] = ends.value(end, 0) + 1;
    if (is_lost(one)) continue;
    squares += (one.reward - learnt.reward) * (one.reward - learnt.reward);
    tokens += one.own_tokens;
    ++count;
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const auto own = Shard{rank, ranks}.of(plan.lanes);
    const auto seconds = std::span(of_lanes).subspan(static_cast<size_t>(own.begin),
                                                     static_cast<size_t>(own.size()));
    of_ranks.push_back(std::accumulate(seconds.begin(), seconds.end(), 0.0));
  }
  const double slowest = *std::max_element(of_ranks.begin(), of_ranks.end());
  const auto mean = [&](const std::string& name) {
    const auto found = means.find(name);
    return found == means.end() ? 0 : found->second;
  };
  Json out{{"stage", unit.stage + 1},
           {"iteration", unit.number},
           {"reward", learnt.reward},
           {"reward_std", count > 1 ? std::sqrt(squares / (count - 1)) : 0},
           {"parts", Json::object()},
           {"kl", learnt.kl},
           {"entropy", learnt.entropy},
           {"clip_low", learnt.clipped_low},
           {"clip_high", learnt.clipped_high},
           {"frac_flat", learnt.equal_share},
           {"dropped", dropped},
           {"grad_norm", learnt.gradient_norm},
           {"lr", options.learning_rate},
           {"tokens", static_cast<int64_t>(tokens)},
           {"length_mean", mean("tokens")},
           {"length_max", static_cast<int64_t>(mean("longest"))},
           {"turns_mean", mean("turns")},
           {"end", std::move(ends)},
           {"tokens_per_s", slowest > 0 ? tokens / slowest : 0}};
  for (const char* part : {"state", "told", "policy"}) {
    out["parts"][part] = mean(std::string("reward/") + part);
  }
  out["per_rank"]["rollout_s"] = std::move(of_ranks);
  return out.dump();
}

std::string equal_groups_warning(const std::vector<CurvePoint>& curve, int64_t iterations) {
  constexpr size_t kRow = 10;
  if (curve.size() < kRow) return "";
  double equal = 0, reward = 0;
  for (const auto& point : std::span(curve).last(kRow)) {
    if (point.learnt.equal_share <= 0.6) return "";
    equal += point.learnt.equal_share / kRow;
    reward += point.learnt.reward / kRow;
  }
  return fmt::format(
      "[three_domain] in each of the last {} iterations (up to {} of {}) more than 0.6 of the "
      "groups had equal rewards, {:.2f} on average: GRPO learns nothing from these. The mean "
      "reward was {:.2f}: give {} tasks, a larger --group-size, or a higher --temperature",
      kRow, curve.size(), iterations, equal, reward, reward < 0.5 ? "easier" : "harder");
}

size_t stages_done(const Curriculum& curriculum, const RunState& state) {
  size_t whole = 0;
  while (whole < state.rows.size() && state.rows[whole].size() == curriculum.columns.size())
    ++whole;
  return whole == 0 ? 0 : whole - 1;
}

RunRecord record_of(const Curriculum& curriculum, const RunOptions& options, const RunState& state,
                    const RunResult& result, const GoldCalls& gold,
                    const std::map<std::string, double>& joint) {
  const auto& stages = curriculum.stages;
  const size_t done = stages_done(curriculum, state);
  RunRecord out{.retention_tasks = options.retention_tasks > 0
                                       ? options.retention_tasks
                                       : std::numeric_limits<int64_t>::max(),
                .seed = static_cast<uint64_t>(options.seed)};
  for (size_t s = 0; s < done; ++s) {
    StageRecord stage{.stage_id = stages[s].id, .domain = stages[s].domain};
    for (const auto& point : state.curve) {
      if (point.stage != static_cast<int64_t>(s)) continue;
      stage.episodes += options.prompts * options.group_size;
      if (point.own_reward) stage.curve.push_back(*point.own_reward);
    }
    for (const auto& key : stages[s].learning) {
      const auto names = names_of_agents(gold.at(key));
      stage.training_tools.insert({names.begin(), names.end()});
    }
    out.stages.push_back(std::move(stage));
  }
  const size_t columns = curriculum.is_joint() ? curriculum.columns.size() : done;
  for (size_t j = 0; curriculum.is_joint() && j < columns; ++j) {
    out.joint_domains.push_back(curriculum.columns[j].domain);
  }
  for (size_t j = 0; !joint.empty() && j < columns; ++j) {
    if (j == 0) out.other.joint.emplace();
    out.other.joint->push_back(joint.at(curriculum.columns[j].domain));
  }
  const auto trials = static_cast<size_t>(options.eval_trials);
  for (size_t i = 0; i <= done; ++i) {
    out.cells.emplace_back();
    for (size_t j = 0; j < columns; ++j) {
      auto& tasks = out.cells.back().emplace_back();
      const auto& all = state.rows[i][j].trials;
      const auto& evaluation = curriculum.columns[j].evaluation;
      for (size_t k = 0; k < evaluation.size(); ++k) {
        const auto& key = evaluation[k];
        const auto first = all.begin() + static_cast<std::ptrdiff_t>(k * trials);
        tasks.push_back({.id = key.id,
                         .gold = names_of_agents(gold.at(key)),
                         .has_argument = has_argument(gold.at(key)),
                         .trials = {first, first + static_cast<std::ptrdiff_t>(trials)}});
      }
    }
  }
  out.baselines["null"] = by_domain(curriculum, columns, result.null_agent);
  if (!result.oracle.empty())
    out.baselines["oracle"] = by_domain(curriculum, columns, result.oracle);
  std::vector<double> warm;
  for (const auto& cell : state.rows.front()) warm.push_back(cell.mean());
  out.baselines["warm_up"] = by_domain(curriculum, columns, warm);
  return out;
}

}  // namespace lockstep::rl
