// The coordinator's lines that name hosts to its user.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "launch/rendezvous/coordinator/coordinator.h"

namespace lockstep::launch {

namespace {

constexpr size_t kMost = 20;  // names in a line

}  // namespace

std::string Coordinator::who_is_here() const {
  std::vector<std::string> here;
  std::vector<int> missing;
  for (const auto& [id, host] : hosts_) {
    if (here.size() < kMost) here.push_back(host.join.host);
  }
  for (int rank = 0; rank < job_spec_.max_nodes && missing.size() < kMost; ++rank) {
    if (!by_node_rank_.contains(rank)) missing.push_back(rank);
  }
  return fmt::format("here: {}{}", fmt::join(here, ", "),
                     by_node_rank_.empty()
                         ? ""
                         : fmt::format("; missing: node rank {}", fmt::join(missing, ", ")));
}

// Lines for the user while no rank runs.
void Coordinator::remark_on_waiting(Time now) {
  if (phase_ != Phase::Gathering || hosts_.empty()) return;
  remarks_.on_waiting({.where = where_,
                       .who = who_is_here(),
                       .ready = in(State::Ready),
                       .is_fenced = now < fenced_until()},
                      job_spec_, timing_, now);
}

// The others may have waited for them.
std::string Coordinator::words_for_the_done() const {
  const auto done = hosts_in(State::Done);
  if (done.empty()) return "";
  return fmt::format("; the ranks on {} had all exited with status 0 before",
                     done.size() > kMost ? fmt::format("{} hosts", done.size())
                                         : fmt::format("{}", fmt::join(done, ", ")));
}

std::vector<std::string> Coordinator::hosts_in(State state) const {
  std::vector<std::string> names;
  for (const auto& [id, host] : hosts_) {
    if (host.state == state) names.push_back(host.join.host);
  }
  return names;
}

}  // namespace lockstep::launch
