// What is asked, what the policy says to it, and the words in which it is asked.
#pragma once

#include <array>
#include <span>
#include <string>
#include <string_view>

#include "rl/embedded/world.h"

namespace lockstep::rl::embedded {

// What a user wants.
enum class Request {
  CancelFlight,
  AddBags,
  Upgrade,
  CancelOrder,
  Return,
  Exchange,
  SetZip,
  RestoreData,
};

// How the conversation has to end.
enum class Outcome {
  Done,       // the write is made
  Consented,  // the same, after the user agreed to pay
  Declined,   // the user did not agree
  Denied,
  Moved,  // to a colleague
  Resumed,
  Owes,
  Roaming,
  Refuelled,
};

// The clause of the policy that decides, and what it then says. Tasks are drawn by clause, so that
// each matters; `weight` says how often, among those of its request.
struct Clause {
  std::string_view name;
  Outcome outcome = Outcome::Done;
  int weight = 1;
  bool is_plain = false;  // the first table decides: all that difficulty 1 has
};

// The words of a request are any of `openings` with any of `rest`. "{}" stands for the argument.
struct RequestKind {
  Request request;
  Kind kind;
  int weight;                        // how often a task is of this kind, in its domain
  std::string_view write;            // the tool that does it; of RestoreData: none
  std::string_view question;         // what has to be asked besides; empty: nothing
  std::span<const Clause> clauses;   //
  std::span<const Outcome> endings;  // what the conversation can come to
  std::array<std::string_view, 4> openings;
  std::array<std::string_view, 4> rest;
};

std::span<const RequestKind> requests_of(Kind kind);
const RequestKind& kind_of(Request request);

// What the policy needs to know of a task.
struct Case {
  Request request;
  const Record* record;
  const Second* second;  // the record's; of Exchange the wanted item; none in telecom
  bool consents = false;
};

// The clause that decides, of those of the request. Never fails.
const Clause& deciding(const Case& asked);

// The policy as text, for agents that read it.
std::string_view policy_of(Kind kind);

// Sixteen phrasings a request: 8 for training, 4 for the other splits, of the same words.
inline constexpr int kTrainPhrasings = 8;
inline constexpr int kTestPhrasings = 4;

// Phrasing `index` of the split's.
std::string phrase(const RequestKind& kind, Split split, int index, std::string_view argument);

}  // namespace lockstep::rl::embedded
