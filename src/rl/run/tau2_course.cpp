#include <map>
#include <memory>
#include <string>

#include "lockstep/rl/chat.h"
#include "lockstep/rl/run.h"
#include "lockstep/rl/tau2.h"
#include "rl/run/policy.h"

namespace lockstep::rl {

Course tau2_course(const RunOptions& options, const Tau2Options& process) {
  const ChatFormat format = chat_format_of(options);
  Course out{.text = chat_text({.format = format})};
  const Tau2Bridge bridge(process);
  out.versions = [bridge] {
    return std::map<std::string, std::string>{{"tau2_version", bridge.version()}};
  };
  if (options.user == "model") out.user_voice = std::make_shared<Voice>();
  const auto make_user = [solo = options.solo, voice = out.user_voice,
                          format]() -> std::unique_ptr<UserSimulator> {
    if (solo) return std::make_unique<NoUser>();
    if (voice) return std::make_unique<ModelUser>(voice, format);
    return std::make_unique<Tau2ScriptedUser>();
  };
  const Solo solo = options.solo ? Solo::Yes : Solo::No;
  for (const auto& name : options.order) {
    Tau2TaskFile file{.learning = options.learning_tasks()};
    if (const auto own = options.task_files.find(name); own != options.task_files.end())
      file.path = own->second;
    out.arenas[name] = {std::make_shared<const Tau2Domain>(name, bridge, solo, std::move(file)),
                        make_user};
  }
  return out;
}

}  // namespace lockstep::rl
