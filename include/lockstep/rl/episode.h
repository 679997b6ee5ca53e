// One conversation about one task: whose turn it is, and when it is over.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/rl/environment.h"
#include "lockstep/rl/message.h"
#include "lockstep/rl/tool_call.h"
#include "lockstep/rl/user.h"

namespace lockstep::rl {

// What a malformed message does.
enum class Malformed {
  Ends,      // the episode ends with End::BadCall
  Reported,  // the agent reads what was wrong; it counts as an error
};

// What an episode may take. The tokens are for those who generate text: an Episode counts none.
struct Limits {
  int64_t max_turns = 8;        // messages of the agent
  int64_t max_errors = 8;       // failed calls and malformed messages
  int64_t max_new_tokens = 32;  // of one message of the agent
  int64_t context = 384;        // tokens of the whole conversation
  Malformed malformed = Malformed::Ends;
  ToolCallOptions calls = {};
};

// A state machine, so that one thread can run hundreds while a model writes the next message of
// all of them:
//
//   Episode episode(*environment, user, {.max_turns = 8});
//   std::vector<Message> seen = episode.begin(key, seed);
//   while (!episode.over()) seen = episode.agent_says(generate(seen));
//   double reward = episode.reward().value;
//
// An environment that dies, or gives a reward that is not finite, ends its episode with
// End::EnvError and reward 0; nothing is thrown.
class Episode {
 public:
  // Keeps references to both. Throws ConfigError for limits below 1.
  Episode(Environment& environment, UserSimulator& user, Limits limits = {});

  // Resets the environment. Returns what the agent sees before it speaks, without the policy and
  // the tools, which are in scene(). `key`: what the user draws from, with the turn's number. May
  // be called again, for another task.
  std::vector<Message> begin(const TaskKey& task, uint64_t key);

  // What the agent sees next; nothing when the episode is over. Throws Error when it was over
  // before.
  std::vector<Message> agent_says(std::string_view text);

  // Ends it for a reason that its caller knows: End::TooLong, End::ContextFull, or End::AgentStop.
  // Without effect on an episode that is over.
  void stop(End why);

  // Whether it has ended, and how.
  bool over() const { return why_ != End::None; }
  // End::None while it continues.
  End why() const { return why_; }

  // What it earned; asks the environment once. A value that a rounding away is 0 or 1 is that.
  // Throws Error before the end, ConfigError for a value outside [0, 1]; one that is not finite
  // costs the episode, as an environment that dies.
  const Reward& reward();

  // What the task began with.
  const Scene& scene() const { return scene_; }
  // All messages after Scene::history.
  const std::vector<Message>& log() const { return log_; }
  // Messages of the agent, its calls, and errors as Limits counts them.
  int64_t turns() const { return turns_; }
  int64_t calls() const { return calls_; }
  int64_t errors() const { return errors_; }
  // The limits it has.
  const Limits& limits() const { return limits_; }

 private:
  std::vector<Message> respond(std::string_view text);
  std::vector<Message> call_tools(std::vector<ToolCall> calls);
  const Message& answer_to(const ToolCall& call);
  std::vector<Message> malformed(std::string_view text, const std::string& fault);
  std::vector<Message> user_speaks();
  void fail(const EnvironmentError& error);
  void check_finite() const;
  void check_range();

  Environment* environment_;
  UserSimulator* user_;
  Limits limits_;
  uint64_t key_ = 0;
  Scene scene_;
  std::vector<Message> log_;
  End why_ = End::None;
  int64_t turns_ = 0;
  int64_t calls_ = 0;
  int64_t errors_ = 0;
  bool is_evaluated_ = false;
  Reward reward_;
};

}  // namespace lockstep::rl
