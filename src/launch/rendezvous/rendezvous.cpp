#include "launch/rendezvous/rendezvous.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "core/number.h"

namespace lockstep::launch {
namespace {

using std::chrono::milliseconds;

constexpr int kMostNodes = 50'000;  // whose order fits into a message
// After how many intervals without a heartbeat torchrun takes a host for lost.
constexpr int kHeartbeats = 3, kMostHeartbeats = 1'000'000;
constexpr milliseconds kLongest{1'000'000'000};

milliseconds seconds_of(std::string_view key, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(value) || value < 0 ||
      value * 1000 > static_cast<double>(kLongest.count())) {
    throw ConfigError(
        fmt::format("[run] --rdzv-conf {}={}: give seconds, from 0 to 1000000", key, text));
  }
  return milliseconds(std::llround(value * 1000));
}

bool flag_of(std::string_view key, const std::string& text) {
  if (text == "1" || text == "true" || text == "True") return true;
  if (text == "0" || text == "false" || text == "False") return false;
  throw ConfigError(fmt::format("[run] --rdzv-conf {}={}: give 1 or 0", key, text));
}

}  // namespace

void Rendezvous::set_nodes(std::string_view text) {
  const size_t colon = text.find(':');
  const auto least = whole_number_from<int>(text.substr(0, colon));
  const auto most = colon == text.npos ? least : whole_number_from<int>(text.substr(colon + 1));
  if (!least || !most || *least < 1 || *most < *least || *most > kMostNodes) {
    throw ConfigError(fmt::format(
        "[run] --nnodes '{}': give a number of hosts, or MIN:MAX, from 1 to {}", text, kMostNodes));
  }
  min_nodes = *least;
  max_nodes = *most;
}

void Rendezvous::set_conf(std::string_view text) {
  // Of torchrun's rendezvous over a store, which launchers do without.
  const std::set<std::string_view> needless = {"close_timeout", "cas_backoff_max_seconds"};
  std::optional<int> attempts;
  bool has_interval = false, has_heartbeat = false;
  const std::map<std::string_view, milliseconds*> times = {
      {"join_timeout", &join_timeout},           {"timeout", &join_timeout},
      {"last_call_timeout", &last_call_timeout}, {"heartbeat_timeout", &heartbeat_timeout},
      {"read_timeout", &heartbeat_timeout},      {"keep_alive_interval", &keep_alive_interval},
      {"rejoin_timeout", &rejoin_timeout},
  };
  while (!text.empty()) {
    const std::string_view pair = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), pair.size() + 1));
    if (pair.empty()) continue;
    const size_t equals = pair.find('=');
    const std::string_view key = pair.substr(0, equals);
    if (equals == pair.npos) {
      throw ConfigError(fmt::format("[run] --rdzv-conf '{}': give KEY=VALUE,KEY=VALUE", pair));
    }
    const std::string value(pair.substr(equals + 1));
    if (const auto time = times.find(key); time != times.end()) {
      *time->second = seconds_of(key, value);
      has_interval = has_interval || time->second == &keep_alive_interval;
      has_heartbeat = has_heartbeat || time->second == &heartbeat_timeout;
    } else if (needless.contains(key)) {
      static_cast<void>(seconds_of(key, value));
    } else if (key == "keep_alive_max_attempt") {
      attempts = whole_number_from<int>(value);
      if (!attempts || *attempts < 1 || *attempts > kMostHeartbeats) {
        throw ConfigError(
            fmt::format("[run] --rdzv-conf keep_alive_max_attempt={}: give a number from 1 to {}",
                        value, kMostHeartbeats));
      }
    } else if (key == "store_type") {
      if (value != "tcp") {
        throw ConfigError(
            fmt::format("[run] --rdzv-conf store_type={} is not supported: launchers meet over the "
                        "network (what works: tcp)",
                        value));
      }
    } else if (key == "tls") {
      tls = flag_of(key, value);
    } else if (key == "same_command") {
      same_command = flag_of(key, value);
    } else if (key == "is_host") {
      is_host = flag_of(key, value);
    } else if (key == "rank") {
      node_rank = whole_number_from<int>(value);
      if (!node_rank)
        throw ConfigError(fmt::format("[run] --rdzv-conf rank={}: give a number", value));
    } else {
      throw ConfigError(
          fmt::format("[run] --rdzv-conf {}: unknown; known are join_timeout (timeout), "
                      "last_call_timeout, heartbeat_timeout (read_timeout), keep_alive_interval, "
                      "keep_alive_max_attempt, rejoin_timeout, tls, same_command, is_host, rank",
                      key));
    }
  }
  if (!has_heartbeat && (attempts || has_interval)) {
    const auto silence = keep_alive_interval * attempts.value_or(kHeartbeats);
    if (silence > kLongest) {
      throw ConfigError(fmt::format(
          "[run] --rdzv-conf: {} heartbeats (keep_alive_max_attempt), one each "
          "keep_alive_interval={:g} s, take longer than the 1000000 s that a host may be silent",
          attempts.value_or(kHeartbeats), static_cast<double>(keep_alive_interval.count()) / 1e3));
    }
    heartbeat_timeout = attempts ? silence : std::max(heartbeat_timeout, silence);
  }
  if (heartbeat_timeout < milliseconds(200) || keep_alive_interval < milliseconds(20) ||
      keep_alive_interval * 2 > heartbeat_timeout) {
    throw ConfigError(fmt::format(
        "[run] --rdzv-conf: a heartbeat each keep_alive_interval={:g} s and heartbeat_timeout={:g} "
        "s: need 0.02 s and 0.2 s at least, and two heartbeats within the timeout",
        static_cast<double>(keep_alive_interval.count()) / 1e3,
        static_cast<double>(heartbeat_timeout.count()) / 1e3));
  }
}

}  // namespace lockstep::launch
