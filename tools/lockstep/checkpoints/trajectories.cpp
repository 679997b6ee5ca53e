// `lockstep inspect trajectories.jsonl`.
#include <fmt/format.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoints/commands.h"
#include "core/counted.h"
#include "lockstep/core/error.h"

namespace lockstep::tool {
namespace {

using OrderedJson = nlohmann::ordered_json;

struct Episodes {
  int64_t count = 0;
  double reward = 0;
  std::map<std::string, int64_t> ends;
};

// A control character of a log may not reach the terminal.
std::string printable_lines(std::string text) {
  for (char& c : text) {
    const auto code = static_cast<unsigned char>(c);
    if ((code < 0x20 && c != '\n') || code == 0x7f) c = '?';
  }
  return text;
}

std::string place_of(const OrderedJson& episode) {
  const bool learns = episode.at("phase") == "learn";
  return fmt::format("{} {:>2} {}", learns ? "learning in stage   " : "evaluation after row",
                     episode.at(learns ? "stage" : "row").get<int64_t>(),
                     episode.at("domain").get<std::string>());
}

void print_conversation(const OrderedJson& episode) {
  fmt::print("{}/{}/{}: reward {}, {}\n", printable_lines(episode.at("domain")),
             printable_lines(episode.at("split")), printable_lines(episode.at("id")),
             episode.at("reward").get<double>(), printable_lines(episode.at("end")));
  for (const auto& message : episode.at("messages")) {
    fmt::print("{:>9}  {}\n", printable_lines(message.at("role")),
               printable_lines(message.at("content")));
    if (!message.contains("calls")) continue;
    for (const auto& call : message.at("calls")) {
      fmt::print("{:>9}  {} {}\n", "calls", printable_lines(call.at("name")),
                 printable_lines(call.at("arguments")));
    }
  }
}

}  // namespace

int inspect_trajectories(const std::string& path, int64_t episode) {
  std::ifstream file(path);
  if (!file) throw Error(fmt::format("[inspect] {} cannot be opened", path));
  std::vector<std::pair<std::string, Episodes>> groups;
  int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    try {
      const OrderedJson json = OrderedJson::parse(line);
      if (episode > 0 && number == episode) {
        print_conversation(json);
        return 0;
      }
      const std::string place = printable_lines(place_of(json));
      if (groups.empty() || groups.back().first != place) groups.emplace_back(place, Episodes{});
      auto& of = groups.back().second;
      ++of.count;
      of.reward += json.at("reward").get<double>();
      ++of.ends[printable_lines(json.at("end"))];
    } catch (const OrderedJson::exception&) {
      throw Error(
          fmt::format("[inspect] {}:{}: this is not an episode of three_domain", path, number));
    }
  }
  if (episode > 0) {
    throw ConfigError(fmt::format("[inspect] --episode {}: {} has {}", episode, path,
                                  counted(number, "episode")));
  }
  fmt::print("{}: {}\n", path, counted(number, "episode"));
  for (const auto& [place, of] : groups) {
    std::string ends;
    for (const auto& [name, count] : of.ends) ends += fmt::format("  {} {}", name, count);
    fmt::print("  {:<34} {:>6} episodes  mean reward {:.3f} {}\n", place, of.count,
               of.reward / static_cast<double>(of.count), ends);
  }
  return 0;
}

}  // namespace lockstep::tool
