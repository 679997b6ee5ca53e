// A policy that learns from episodes, on many ranks: GRPO, or supervised learning from those that
// went well. The batch is cut into lanes (lockstep/parallel/lanes.h), so every number of ranks up
// to that of the lanes computes the same bits.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/comm/group.h"
#include "lockstep/core/shard.h"
#include "lockstep/models/transformer.h"
#include "lockstep/rl/grpo.h"
#include "lockstep/rl/rollout.h"

namespace lockstep::rl {

// What is known of an episode on every rank.
struct Outcome {
  double reward = 0;
  double end = 0;  // End, as a number
  double turns = 0;
  double calls = 0;
  double errors = 0;
  double own_tokens = 0;
  double state = 0, told = 0, policy = 0;  // parts of the reward, where it has these
  double seconds = 0;                      // of its lane's rollout, divided by the lane's episodes
};

// A rollout: every episode's outcome on every rank, and whole episodes of this rank's lanes.
struct Rollout {
  std::vector<Outcome> outcomes;              // by number of the episode
  std::vector<std::vector<size_t>> numbers;   // by lane of this rank: its episodes
  std::vector<std::vector<Played>> episodes;  // the same
  // By number of the episode, the same within a group, 1: its reward counts for nothing, and the
  // policy is only held near the reference on it. Empty: none. On every rank the same.
  std::vector<uint8_t> held = {};
};

// How a rollout is divided. The same on all ranks.
struct RolloutPlan {
  std::vector<Planned> episodes;  // groups of `group_size` of one task
  int64_t group_size = 1;         // a group is played in one lane
  int64_t lanes = 1;              // those of the learner, LearnerOptions::lanes
  // How long a rank that has played waits for the others; none: as long as for any exchange.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;

  // Of an episode, by its place in `episodes`.
  int64_t lane_of(int64_t episode) const { return episode / group_size % lanes; }
};

// Group g belongs to lane g modulo lanes; each rank plays its lanes, one after another, by `play`,
// which returns what it is given in the same order. Every rank calls it: one exchange of the
// outcomes. Throws ConfigError for fewer lanes than ranks, groups of none, and, on all ranks, a
// `play` that returns more or fewer episodes. What `play` throws on one rank ends the group: the
// others get a CommError that quotes it in their next call of the group, the exchange if not one of
// their `play`, which may ask Group::failure() while it is at work.
Rollout run_rollout(const RolloutPlan& plan, const comm::Group& group,
                    const std::function<std::vector<Played>(const std::vector<Planned>&)>& play);

// Where a reference's parameters are.
enum class ReferencePlace {
  Resident,   // all of them on each rank's device
  Sharded,    // sharded over the ranks like the policy, which has to be sharded, too
  Offloaded,  // sharded, in the hosts' memory; of ranks on CPUs in files of reference_folder. The
              // devices have the blocks in use
};

// How a learner learns. The same on all ranks.
struct LearnerOptions {
  bool use_grpo = true;  // false: each episode of reward 1 is imitated, and nothing else
  GrpoOptions grpo = {};
  LossNorm norm = LossNorm::Token;
  ScaleRewards scale = ScaleRewards::Std;
  int64_t group_size = 8;
  bool drop_equal_groups = true;  // without the divergence from the reference, too
  int64_t updates = 1;            // for each rollout
  double learning_rate = 3e-4;
  double max_grad_norm = 1;
  LogProbOptions log_probs = {};
  int64_t longest = 256;  // tokens that an episode may have written, for LossNorm::Constant
  int64_t lanes = 8;      // of each rollout that it learns from, RolloutPlan::lanes
  uint64_t seed = 1;
  // Policy and the optimizer's state are sharded over the ranks, by Fsdp, and backward computes
  // the policy's blocks again instead of keeping their activations; false: each rank has all of
  // them, as under Ddp.
  bool divided = false;
  ReferencePlace reference = ReferencePlace::Resident;
  std::string reference_folder = {};  // on a disk of each rank's host
  // Both models compute in bfloat16, the optimizer updates float32 parameters.
  bool narrow = false;
};

// What an update has done, the same on every rank.
struct Learnt {
  double reward = 0;       // mean over episodes that are not lost
  double equal_share = 0;  // of groups whose rewards are all equal, without those that are held
  int64_t kept = 0;        // episodes that were learnt from
  int64_t tokens = 0;      // theirs, that the model wrote
  bool updated = false;    // false: there was nothing to learn from
  // Means over tokens and updates.
  double kl = 0, entropy = 0, clipped_low = 0, clipped_high = 0;
  double gradient_norm = 0;  // before it was clipped, of the last update
};

// Every rank constructs it and calls its functions together.
class Learner {
 public:
  // Attaches a Ddp or an Fsdp with lanes to the net, whose parameters become rank 0's. Keeps the
  // net. Throws ConfigError for impossible options.
  Learner(const models::Transformer& net, const comm::Group& group, LearnerOptions options);
  ~Learner();

  // Makes the net's present parameters the reference.
  void set_reference();

  // `step` names the update among all of the run. Episodes that ended with End::EnvError are lost:
  // they are in no mean, deviation or count; a group's advantages are over those that are left, and
  // of a single one they are 0. Throws ConfigError for episodes that are held where there is no
  // reference, and, on all ranks, for a rollout with another number of lanes.
  Learnt learn(const Rollout& rollout, int64_t step);

  // One supervised step: the mean loss of all tokens with the mark of own ones, over all ranks.
  // Batches of this rank's lanes, in order; `tokens` counts those of all lanes. The learning rate
  // is the optimizer's. Throws ConfigError for batches of another number of lanes.
  double imitate(const std::vector<std::vector<const models::DialogueTokens*>>& lanes,
                 int64_t tokens, int64_t step);

  // A new one: no moments, this learning rate.
  void renew_optimizer(double learning_rate);
  void set_learning_rate(double rate);

  // While texts are written, or the net is saved by other means, every rank has all parameters:
  // between these two, which every rank calls.
  void unshard();
  void reshard();

  // What a run resumes with: "net", "adam" and, where beta is above 0, "reference". A checkpoint
  // says nothing of how they were sharded.
  void track(checkpoint::Checkpointer& checkpoints);
  // The net alone.
  void track_net(checkpoint::Checkpointer& checkpoints);

  // What learn() has taken for the reference's log-probabilities, on this rank.
  double reference_seconds() const;

  // A hash of the parameters, the same on all ranks, which all call it.
  uint64_t fingerprint();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::rl
