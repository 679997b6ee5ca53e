// Steps that may fail on one rank alone, and have to end on all.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "comm/text.h"
#include "lockstep/comm/group.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {

// In a handler of exceptions, before it throws on: in the place of what this rank has for an
// exchange that the others wait in, they are given `text`.
inline void give_up(const Group& group, const std::string& text, const CallOptions& exchange) {
  try {
    group.all_gather_bytes(text, exchange);
  } catch (const CommError&) {
    // What was thrown before is what counts.
  }
}

// Every rank calls it. What `step` throws on one rank is thrown on all: there the exception itself,
// on the others an error that begins with `address` and quotes it, a ConfigError where that is one.
template <class Step>
void together(const Group& group, std::string_view address, const Step& step) {
  if (group.size() == 1) return step();
  const CallOptions exchange{.label = address};
  try {
    step();
  } catch (...) {
    give_up(group, told_text(), exchange);
    throw;
  }
  const auto texts = group.all_gather_bytes("", exchange);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].empty()) throw_told(texts[rank], fmt::format("[{}] rank {}: ", address, rank));
  }
}

}  // namespace lockstep::comm
