// An error that one rank finds in a pass, thrown on all ranks.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

#include "lockstep/comm/group.h"
#include "lockstep/core/error.h"

namespace lockstep::parallel {

// An average over the ranks would be a part of the gradient.
inline std::string frozen_on_one_rank(std::string_view name) {
  return fmt::format(
      "parameter '{}' is frozen on this rank, and another rank computed a gradient of it: freeze "
      "it on all ranks, before the first backward() of a step",
      name);
}

// An exception in the middle of a pass would keep the rank from its collectives, for which the
// others wait. So it is recorded, the flags of the pass tell the others, and then all throw.
class Objection {
 public:
  // The first one counts.
  void add(std::string text) {
    if (text_.empty()) text_ = std::move(text);
  }
  bool is_raised() const { return !text_.empty(); }
  std::string take() { return std::exchange(text_, {}); }
  // Every rank calls it when some rank has objected: throws the first one's ConfigError, which
  // begins with `address`.
  void refuse(const Group& group, std::string_view address, const comm::CallOptions& options) {
    const auto texts = group.all_gather_bytes(take(), options);
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      if (texts[rank].empty()) continue;
      throw ConfigError(fmt::format("[{}] rank {}: {}", address, rank, texts[rank]));
    }
  }

 private:
  std::string text_;
};

}  // namespace lockstep::parallel
