// A user who is played by a language model, as in tau2-bench (Barres et al., 2025): it is told how
// users behave and what this one wants, and sees the conversation from the other side.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "lockstep/rl/chat.h"
#include "lockstep/rl/environment.h"
#include "lockstep/rl/message.h"
#include "lockstep/rl/user.h"

namespace lockstep::rl {

// The message that a model writes after a text (in which chat_text()'s bytes F8 may be), without
// what ends it: a pure function of the text and of the key, which is what it draws from. Throws
// EnvironmentError for a text that is too long for it.
using Voice = std::function<std::string(const std::string& prompt, uint64_t key)>;

// System message: Scene::guidelines and the scenario. The agent's texts are the other side's; its
// calls and their results are not seen. A user with tools calls them as agents do.
class ModelUser : public UserSimulator {
 public:
  // `voice` may be filled later, before the first message.
  ModelUser(std::shared_ptr<const Voice> voice, ChatFormat format);

  // An empty message, or one of blanks, ends the conversation with kOutOfScope.
  Message next(const Scene& scene, std::span<const Message> log, uint64_t key) override;

 private:
  std::shared_ptr<const Voice> voice_;
  ChatFormat format_;
};

}  // namespace lockstep::rl
