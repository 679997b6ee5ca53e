// Keys in the store under which the ranks of a group post the call that they wait in. Used only
// when an operation takes long or fails: one that goes well costs no request.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/store/store.h"

namespace lockstep::comm {

struct Notice {
  enum class State {
    Waiting,  // in the operation
    Running,  // left the operation, which had taken long
    Failed,   // aborted the group in the operation
  };

  // Instead of a call, for a group that ends because another one did.
  static constexpr const char* kEnd = "its end";
  // The reason of a rank whose call differs from the others'.
  static constexpr const char* kOtherCall = "is not what the others called";

  State state = State::Waiting;
  // Which sequence `number` counts in: "all" for collectives, "0>1" for messages.
  std::string lane;
  uint64_t number = 0;
  std::string signature;
  std::string text;    // the operation in words
  std::string reason;  // of Failed
  std::string advice;  // of the call

  std::string packed() const;
  static std::optional<Notice> unpacked(const std::string& text);
  // Of Failed, what follows the rank's name: "timed out after 5 s", "aborted: out of memory".
  std::string failure() const;
  // Whether the two are different calls at the same place.
  bool contradicts(const Notice& other) const;
};

class PeerStatus {
 public:
  // When a call counts as long: the ranks then compare what they wait for.
  static constexpr std::chrono::milliseconds kLongWait{1000};
  // How long an error may be delayed to collect the others' notices; a second more where the store
  // does not answer.
  static constexpr std::chrono::milliseconds kInquiry{300};

  // By rank; empty for a rank that has posted no notice. This rank's own is there when the store
  // has answered.
  using Notices = std::vector<std::optional<Notice>>;

  // `store` should be a connection of its own; `members` are the world's numbers of the group's
  // ranks. Ranks that are known to have ended are not waited for.
  PeerStatus(Store store, int rank, std::vector<int> members);

  // Posts this rank's notice and reads the others'. Waits up to `limit` until all ranks have a
  // notice of Failed, less when the launcher has explained the end. Never takes much longer, and
  // never throws, even when the store does not answer.
  Notices exchange(const Notice& mine, std::chrono::milliseconds limit);
  // The notices once some rank has posted that it failed, as far as is known; asks the store in the
  // background.
  std::optional<Notices> peek();
  // Only posts it, in the background.
  void post(const Notice& mine);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace lockstep::comm
