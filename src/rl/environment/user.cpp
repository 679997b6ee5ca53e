#include "lockstep/rl/user.h"

#include <string>

namespace lockstep::rl {

bool ends_conversation(std::string_view text) {
  return text.find("###") != std::string_view::npos &&
         (text.find(kStop) != std::string_view::npos ||
          text.find(kTransfer) != std::string_view::npos ||
          text.find(kOutOfScope) != std::string_view::npos);
}

Message NoUser::next(const Scene& scene, std::span<const Message> log, uint64_t) {
  return {.role = Role::User, .content = log.empty() ? scene.ticket : std::string(kStop)};
}

}  // namespace lockstep::rl
