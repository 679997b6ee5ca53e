// Who talks to the agent.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "lockstep/rl/environment.h"
#include "lockstep/rl/message.h"

namespace lockstep::rl {

// A user's message that contains one of these ends the conversation: tau2's convention.
inline constexpr std::string_view kStop = "###STOP###";
inline constexpr std::string_view kTransfer = "###TRANSFER###";
inline constexpr std::string_view kOutOfScope = "###OUT-OF-SCOPE###";

// Whether a user who says this ends the conversation.
bool ends_conversation(std::string_view text);

// A user. One may serve many episodes; not thread-safe.
class UserSimulator {
 public:
  virtual ~UserSimulator() = default;

  // What the user says, or which tools he calls, after `log` (all messages after Scene::history; at
  // first without a message of a user). A pure function of its arguments; `key` is what it may draw
  // numbers from.
  virtual Message next(const Scene& scene, std::span<const Message> log, uint64_t key) = 0;
};

// For episodes without a user, as in tau2's solo mode: hands over the ticket, and a text of the
// agent that is not a call ends the conversation.
class NoUser : public UserSimulator {
 public:
  Message next(const Scene& scene, std::span<const Message> log, uint64_t key) override;
};

}  // namespace lockstep::rl
