#include <fmt/format.h>

#include "lockstep/rl/chat.h"
#include "lockstep/rl/dialogue.h"
#include "lockstep/rl/embedded.h"
#include "lockstep/rl/run.h"
#include "rl/run/policy.h"

namespace lockstep::rl {
namespace {

// Tasks of the warm-up come after any that reinforcement learning meets.
constexpr int64_t kFirstOfWarmUp = 100'000;

using Domains = std::map<std::string, std::shared_ptr<const EmbeddedDomain>>;

// What the agent says in a scripted dialogue, as it would write it.
std::vector<std::string> agent_lines(const Dialogue& dialogue) {
  std::vector<std::string> out;
  for (const auto& message : dialogue.messages) {
    if (message.role == Role::Assistant) out.push_back(agent_text(message));
  }
  return out;
}

}  // namespace

Course embedded_course(const RunOptions& options) {
  const ChatOptions chat{.format = chat_format_of(options)};
  Course out{.text = chat_text(chat)};
  Domains domains;
  std::vector<std::string> names;
  for (const auto& name : embedded_domains()) {
    names.emplace_back(name);
    domains[names.back()] = std::make_shared<const EmbeddedDomain>(
        name, EmbeddedOptions{.difficulty = options.difficulty, .tasks = options.tasks_per_domain});
    out.arenas[names.back()] = {domains[names.back()],
                                [] { return std::make_unique<ScriptedUser>(); }};
  }
  const auto seed = static_cast<uint64_t>(options.seed);
  out.demonstrate = [=, skill = options.skill](int64_t number) {
    const auto& domain = *domains.at(names[static_cast<size_t>(number) % names.size()]);
    const TaskKey key = domain.task("train", kFirstOfWarmUp + number);
    return Demonstration{.planned = {key, 0},
                         .lines = agent_lines(play(domain, key, {.skill = skill, .seed = seed}))};
  };
  out.easier = [=](const TaskKey& key) {
    const auto& domain = *domains.at(key.domain);
    return domain.task(key.split, std::stoll(key.id), 1);
  };
  out.demonstrations_key = fmt::format("embedded {} {} {}", options.difficulty, options.skill,
                                       static_cast<int>(chat.format));
  out.oracle = [=](const Planned& planned) {
    return agent_lines(play(*domains.at(planned.task.domain), planned.task));
  };
  return out;
}

}  // namespace lockstep::rl
