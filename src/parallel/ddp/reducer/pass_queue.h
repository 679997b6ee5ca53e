// The order in which several Ddps communicate within one backward().
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::parallel {

class CommHook;
class Reducer;

struct JoinPlace {
  int64_t number = 0;     // in the order in which Ddp::join() of this process was called
  bool is_first = false;  // of its Join
};

// Ranks have to launch the buckets of all Reducers in one order, but when a bucket is complete
// depends on which parameters a rank reaches. So the passes of one backward() are put in an order
// that is the same on all ranks whose backward() has begun the same passes, and a bucket is
// launched only when no bucket that comes before it can follow. What is left at the end of
// backward() follows in that order: first all buckets but each Reducer's last, then Reducer by
// Reducer the last one and all that depends on it.
//
// The order is that of construction reversed, because what is used last in forward() comes first in
// backward(). Reducers in their first pass come after the others, and launch nothing before the end
// of backward(). Two that are past it and meet in one backward() for the first time come in the
// order in which their passes began there: before it, neither could wait for the other.
//
// Within a Join the order is the one in which it names the Ddps, and one finishes before the next
// launches anything, because that is what a rank without a batch does. So it is across groups, too:
// what a Join does not name first launches nothing before the end of backward().
//
// One for all Reducers of a group in this process. One Reducer alone waits for nothing. Groups that
// one backward() reaches are finished after the callbacks of all their passes, in the order of
// construction reversed, too: the group of the latest Reducer comes first. All ranks of a group
// construct its Reducers in one order, so that no rank waits in one group for a rank that waits for
// it in another.
class PassQueue {
 public:
  static std::shared_ptr<PassQueue> of(const Group& group);

  // From its constructor, and from its destructor.
  void add(Reducer& reducer);
  void remove(const Reducer& reducer);
  // Whether gradients of another Reducer, of any group, go through it.
  static bool is_of_another(const CommHook& hook, const Reducer* reducer);

  // A Join has named it.
  void join(const Reducer& reducer, const JoinPlace& place);
  // A pass in which it communicates has begun in the backward() under way.
  void begin(Reducer& reducer);
  // That backward() has thrown.
  void abandon(const Reducer& reducer);
  // Launches what may be launched now that a bucket of `reducer` is due.
  void launch(Reducer& reducer);
  // At the end of backward(), called for each pass: after the last call all are finished.
  static void end(const std::shared_ptr<PassQueue>& queue);

 private:
  struct Member {
    const Reducer* reducer;
    int64_t number;        // in the order in which this process constructed Reducers of any group
    bool has_met = false;  // another one, in some backward()
    JoinPlace in_join = {};
  };

  Member& member(const Reducer& reducer) {
    return *std::ranges::find(members_, &reducer, &Member::reducer);
  }
  bool comes_before(const Reducer& one, const Reducer& other);
  bool waits_for_end(const Reducer& reducer);
  bool may_launch(const Reducer& reducer);
  // Of the passes under way.
  int64_t latest();
  void finish(Reducer& reducer);

  using Queues = std::vector<std::shared_ptr<PassQueue>>;
  static void finish(Queues queues);
  // What finish() has left.
  static void abandon(const Queues& queues);

  std::vector<Member> members_;  // in order of construction
  std::vector<Reducer*> open_;   // passes of the backward() under way, in their order
};

}  // namespace lockstep::parallel
