// Groups of some ranks of a group.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/transport.h"
#include "core/hash/mix.h"
#include "lockstep/comm/group.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// Begins what is exchanged: what another call exchanges may have the same size.
constexpr uint64_t kTag = 0x5b1f9c46e0d3a782;

// The arguments of each rank in split() and subgroup(), as they are exchanged.
struct Choice {
  int color;
  int key;
};
struct Listed {
  uint64_t hash;
  int64_t count;

  bool operator==(const Listed&) const = default;
};

// Those of all ranks of the group in `call`.
template <class Arguments>
std::vector<Arguments> exchanged(const Group& group, const Arguments& mine, std::string_view call) {
  std::string own(sizeof kTag + sizeof mine, '\0');
  const uint64_t tag = kTag ^ fnv1a<uint64_t>(call);
  std::memcpy(own.data(), &tag, sizeof tag);
  std::memcpy(own.data() + sizeof tag, &mine, sizeof mine);
  const auto texts = group.all_gather_bytes(own, {.label = call});
  std::vector<Arguments> all(texts.size());
  for (size_t r = 0; r < texts.size(); ++r) {
    // Such calls differ in nothing that transports compare.
    if (texts[r].size() != own.size() || !texts[r].starts_with(own.substr(0, sizeof tag))) {
      const std::string why = fmt::format(
          "[comm] the ranks disagree: rank {} calls {}, rank {} another call that exchanges bytes. "
          "Every rank must make the same calls in the same order",
          group.rank(), call, r);
      group.abort(why);
      throw CommError(why);
    }
    std::memcpy(&all[r], texts[r].data() + sizeof tag, sizeof mine);
  }
  return all;
}

}  // namespace

Group Group::split(int color, int key) const {
  refuse_python_ranks("split()");
  const auto making = transport_->making_subsets();  // before any rank goes on
  const auto all = exchanged(*this, Choice{color, key}, "split");
  std::vector<std::pair<int, int>> members;  // (key, rank)
  for (int r = 0; r < size(); ++r) {
    if (all[r].color == color) members.emplace_back(all[r].key, r);
  }
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& [unused, r] : members) ranks.push_back(r);
  if (color < 0) ranks = {rank()};
  return part(std::move(ranks), color);
}

// Of `ranks`, this one among them.
Group Group::part(std::vector<int> ranks, int color) const {
  const std::vector<int> own = world_ranks();
  std::vector<int> members;
  for (const int r : ranks) members.push_back(own[static_cast<size_t>(r)]);
  Group group(ranks.size() == 1 ? make_solo_transport() : transport_->subset(ranks, color));
  group.transport_->set_world_ranks(std::move(members));
  // Not to a group of one rank among several: its collectives do not depend on how many there are.
  if (group.size() > 1 || size() == 1) group.transport_->share_lanes_of(*transport_);
  return group;
}

Group Group::subgroup(const std::vector<int>& ranks) const {
  refuse_python_ranks("subgroup()");
  const auto making = transport_->making_subsets();
  const std::string_view bytes(reinterpret_cast<const char*>(ranks.data()),
                               ranks.size() * sizeof(int));
  const Listed mine{fnv1a<uint64_t>(bytes), static_cast<int64_t>(ranks.size())};
  const auto all = exchanged(*this, mine, "subgroup");
  for (int r = 1; r < size(); ++r) {
    if (all[r] == all[0]) continue;
    throw ConfigError(fmt::format(
        "[comm] subgroup: ranks 0 and {} give different lists: every rank gives the same", r));
  }
  for (const int r : ranks) {
    if (r < 0 || r >= size())
      throw ConfigError(
          fmt::format("[comm] subgroup: rank {} is not in this group of {}", r, size()));
    if (std::count(ranks.begin(), ranks.end(), r) > 1)
      throw ConfigError(fmt::format("[comm] subgroup: rank {} is in the list twice", r));
  }
  const bool inside = std::find(ranks.begin(), ranks.end(), rank()) != ranks.end();
  return part(inside ? ranks : std::vector<int>{rank()}, 0);
}

}  // namespace lockstep::comm
