#include "launch/diagnosis/watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "launch/process/descendants.h"

namespace lockstep::launch {
namespace {

// Smaller differences between ranks are noise of a machine with other work.
constexpr double kNotable = 0.10;

constexpr const char* kNowhere = "in no collective so far";

size_t index_of(flight::Activity activity) { return static_cast<size_t>(activity); }

}  // namespace

std::string whereabouts(const Seen& seen, uint64_t now_ns) {
  std::string text = seen.log.where(now_ns);
  const char* state = seen.is_stopped()   ? "its process was stopped, by SIGSTOP or a debugger"
                      : seen.state == 'D' ? "its process was in an uninterruptible wait"
                      : seen.state == kLostMain ? "its main thread has ended, other threads run"
                                                : nullptr;
  if (state == nullptr) return text;
  if (text.empty()) text = kNowhere;
  return fmt::format("{} ({})", text, state);
}

std::optional<int64_t> out_of_memory_kills() {
  std::ifstream counters("/proc/vmstat");
  std::string name;
  for (int64_t value = 0; counters >> name >> value;) {
    if (name == "oom_kill") return value;
  }
  return std::nullopt;
}

Straggling::Straggling(int ranks)
    : since_ns_(flight::now_ns()), before_(static_cast<size_t>(ranks)) {}

Straggling::Share Straggling::share_of(size_t index, const Seen& seen, uint64_t now_ns) const {
  const auto part = [&](flight::Activity activity) {
    const uint64_t before = before_[index][index_of(activity)];
    const uint64_t after = seen.log.busy_ns[index_of(activity)];
    const double whole = static_cast<double>(std::max<uint64_t>(now_ns - since_ns_, 1));
    return std::clamp(static_cast<double>(after - std::min(before, after)) / whole, 0.0, 1.0);
  };
  Share share{part(flight::Activity::Communication), part(flight::Activity::Data)};
  share.data = std::min(share.data, 1 - share.communication);
  return share;
}

std::vector<std::string> Straggling::lines(const std::vector<Seen>& ranks) {
  const uint64_t now = flight::now_ns();
  std::vector<std::string> text = {
      fmt::format("where the ranks are, and their time in the last {:.1f} s:",
                  static_cast<double>(now - since_ns_) * 1e-9)};
  std::vector<Share> shares;
  for (size_t i = 0; i < ranks.size(); ++i) {
    shares.push_back(share_of(i, ranks[i], now));
    before_[i] = ranks[i].log.busy_ns;
    if (ranks[i].is_stopped()) {
      const std::string where = ranks[i].log.where(now);
      text.push_back(fmt::format("  rank {}: {}; stopped (kill -CONT {})", ranks[i].rank,
                                 where.empty() ? kNowhere : where, ranks[i].pid));
      continue;
    }
    const std::string where = whereabouts(ranks[i], now);
    text.push_back(
        fmt::format("  rank {}: {}; {:.0f} % communication, {:.0f} % data, {:.0f} % computing",
                    ranks[i].rank, where.empty() ? kNowhere : where, 100 * shares[i].communication,
                    100 * shares[i].data, 100 * shares[i].computing()));
  }
  since_ns_ = now;
  const auto stopped =
      std::find_if(ranks.begin(), ranks.end(), [](const Seen& one) { return one.is_stopped(); });
  if (stopped != ranks.end()) {
    text.push_back(fmt::format("  {}rank {}{} stopped, by SIGSTOP or a debugger",
                               ranks.size() == 1 ? "" : "the others wait for ", stopped->rank,
                               ranks.size() == 1 ? " is" : ", which is"));
    return text;
  }
  // The rank that waits least for the others is the one they wait for.
  const auto [least, most] = std::minmax_element(
      shares.begin(), shares.end(),
      [](const Share& a, const Share& b) { return a.communication < b.communication; });
  if (most->communication - least->communication >= kNotable) {
    text.push_back(
        fmt::format("  the others wait for rank {}, which {}: {:.0f} % of its time is "
                    "communication, up to {:.0f} % of theirs",
                    ranks[static_cast<size_t>(least - shares.begin())].rank,
                    least->data > least->computing() ? "waits for data" : "computes",
                    100 * least->communication, 100 * most->communication));
  }
  return text;
}

}  // namespace lockstep::launch
