// Agents that read the task, not the conversation.
#include <fmt/format.h>

#include "core/hash/counter.h"
#include "lockstep/rl/dialogue.h"
#include "rl/embedded/environment.h"

namespace lockstep::rl {
namespace {

using namespace embedded;

constexpr uint64_t kPlays = 31;  // the purpose of these draws

std::vector<std::string> imitated(const Task& task, double skill, Draws& draws) {
  const auto right = task.clause->outcome;
  if (draws.chance(skill)) return script(task, right, Looks::AsNeeded);
  auto outcome = draws.pick(task.kind->endings);
  const auto looks = draws.chance(.5) ? Looks::AsNeeded : Looks::Contrary;
  if ((outcome == Outcome::Consented || outcome == Outcome::Declined) && draws.chance(.7)) {
    outcome = task.consents ? Outcome::Consented : Outcome::Declined;
  }
  return script(task, outcome, looks);
}

std::string random_call(const Task& task, Draws& draws) {
  const auto tools = tools_of(task.number.kind);
  const Tool& tool = draws.pick(tools);
  const std::string argument = task.argument.empty() ? "1" : task.argument;
  if (tool.kind == ToolKind::ShowSecond) {
    return call_text(tool.name,
                     fmt::format("{{\"{}\": \"{}\"}}", tool.argument, task.record().second));
  }
  const std::string rest =
      tool.argument.empty() ? "" : fmt::format(", \"{}\": \"{}\"", tool.argument, argument);
  return call_text(tool.name, fmt::format("{{\"id\": \"{}\"{}}}", task.record().id, rest));
}

std::string random_line(const Task& task, Draws& draws) {
  constexpr std::array<std::string_view, 5> kQuestions = {"Which id?", "Confirm?", "Which item?",
                                                          "Which zip?", "How many GB?"};
  switch (draws.below(3)) {
    case 0:
      return std::string(draws.pick(kQuestions));
    case 1:
      return random_call(task, draws);
    default:
      return closing(task, draws.pick(task.kind->endings));
  }
}

}  // namespace

Dialogue play(const EmbeddedDomain& domain, const TaskKey& key, const PlayOptions& options) {
  if (!(options.skill >= 0 && options.skill <= 1)) {
    throw ConfigError(
        fmt::format("[rl] play: skill {}: it is a probability, from 0 to 1", options.skill));
  }
  const auto environment = domain.make();
  const auto& world = static_cast<const EmbeddedEnvironment&>(*environment);
  ScriptedUser user;
  Episode episode(*environment, user, embedded_limits(domain.options().difficulty));
  episode.begin(key, options.seed);
  const Task& task = world.task();
  const auto& number = task.number;
  Draws draws(kPlays, static_cast<int>(options.agent), options.seed, static_cast<int>(number.kind),
              static_cast<int>(number.split), number.index, number.level);
  std::vector<std::string> lines;
  if (options.agent == Agent::Null) lines = {"All done."};
  if (options.agent == Agent::Script) lines = imitated(task, options.skill, draws);
  for (size_t i = 0; !episode.over(); ++i) {
    episode.agent_says(i < lines.size() ? lines[i] : random_line(task, draws));
  }
  Dialogue dialogue{.scene = episode.scene(),
                    .messages = episode.log(),
                    .reward = episode.reward(),
                    .why = episode.why()};
  // That the user leaves is not a message which anybody reads.
  if (dialogue.messages.back().role == Role::User) dialogue.messages.pop_back();
  return dialogue;
}

}  // namespace lockstep::rl
