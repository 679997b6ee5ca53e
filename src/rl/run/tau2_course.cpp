#include <memory>

#include "lockstep/rl/chat.h"
#include "lockstep/rl/run.h"
#include "lockstep/rl/tau2.h"

namespace lockstep::rl {

Course tau2_course(const RunOptions& options, const Tau2Options& process) {
  const std::string format = options.chat_format.empty() ? "qwen3" : options.chat_format;
  Course out{.text = chat_text({.format = chat_format(format)})};
  const Tau2Bridge bridge(process);
  for (const auto& name : options.order) {
    out.arenas[name] = {std::make_shared<const Tau2Domain>(name, bridge),
                        [] { return std::make_unique<Tau2ScriptedUser>(); }};
  }
  return out;
}

}  // namespace lockstep::rl
