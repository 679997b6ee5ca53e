// The model of a run, and how options say that it plays and learns.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "lockstep/comm/world.h"
#include "lockstep/rl/chat.h"
#include "lockstep/rl/episode.h"
#include "lockstep/rl/learner.h"
#include "lockstep/rl/run.h"
#include "rl/policy/agreed.h"

namespace lockstep::rl {

// Loads the model of `folder`, or, where that is empty, warms a tiny one up. `say` is told of the
// warm-up; `each_step` is called on every rank after each step of it, and may throw on all of them.
// Every rank calls it. Throws ConfigError on all ranks.
WarmedUp make_policy(const comm::World& world, const Course& course, const RunOptions& options,
                     const std::string& folder, const std::function<void(std::string)>& say,
                     const std::function<void()>& each_step);

// What a run keeps of a stage. Every rank calls its functions.
struct StagePolicy {
  const comm::Group& group;
  const RunOptions& options;
  Learner& learner;
  const models::Transformer& net;
  const text::Tokenizer& tokenizer;
  const std::string& source;  // the folder that the model came from; empty: none

  // The net as a checkpoint of `folder`, and with export_hf in its folder `huggingface` as one of
  // transformers, with what ends its texts and what only programs that chat with it read. Throws an
  // error of the library on all ranks.
  void save(const std::string& folder, int64_t step) const;
  // Whether save() has done so. The same on all ranks.
  bool is_saved(const std::string& folder) const;
};

// What a copy of the net says, as it is now and stays. The copy is whole on each rank.
Voice frozen_voice(const models::Transformer& net, const text::Tokenizer& tokenizer,
                   const RunOptions& options);

// How conversations look: as --chat-format says, else compact for the tiny model, as the chat
// template in the model's folder says, and Qwen3's without one. Throws ConfigError for a template
// that is not known; a folder that is not there is left to find_model().
ChatFormat chat_format_of(const RunOptions& options);

Limits limits_of(const RunOptions& options);

// GRPO that keeps near to the policy that a stage began with.
bool has_reference(const RunOptions& options);
ReferencePlace reference_place(const RunOptions& options);
// An Fsdp, which shards nothing under "ddp", has the parameters that the optimizer sees; outside
// of its steps the model has none.
bool uses_fsdp(const RunOptions& options);

LearnerOptions learner_options(const RunOptions& options, int64_t vocabulary);
// What a learner of these options learns of an iteration's episodes.
Agreed agreed_on(const Rollout& rollout, const RunOptions& options);

}  // namespace lockstep::rl
