#include "rl/run/state.h"

#include <nlohmann/json.hpp>

namespace lockstep::rl {
namespace {

using Json = nlohmann::ordered_json;

}  // namespace

std::string RunState::to_json() const {
  Json out{{"position", position},  {"iterations", iterations}, {"log_lines", log_lines},
           {"rows", Json::array()}, {"curve", Json::array()},   {"ends", ends}};
  for (const auto& row : rows) {
    Json cells = Json::array();
    for (const auto& cell : row) cells.push_back(cell.rewards);
    out["rows"].push_back(std::move(cells));
  }
  for (const auto& point : curve) {
    const Learnt& l = point.learnt;
    out["curve"].push_back({point.stage, point.iteration, l.reward, l.equal_share, l.kept, l.tokens,
                            l.updated, l.kl, l.entropy, l.clipped_low, l.clipped_high,
                            l.gradient_norm});
  }
  return out.dump();
}

RunState RunState::from_json(const std::string& text) {
  const Json in = Json::parse(text);
  RunState out{.position = in.at("position"),
               .iterations = in.at("iterations"),
               .log_lines = in.at("log_lines")};
  in.at("ends").get_to(out.ends);
  for (const auto& row : in.at("rows")) {
    out.rows.emplace_back();
    for (const auto& cell : row) out.rows.back().push_back({cell.get<std::vector<double>>()});
  }
  for (const auto& p : in.at("curve")) {
    out.curve.push_back({p[0],
                         p[1],
                         {.reward = p[2],
                          .equal_share = p[3],
                          .kept = p[4],
                          .tokens = p[5],
                          .updated = p[6],
                          .kl = p[7],
                          .entropy = p[8],
                          .clipped_low = p[9],
                          .clipped_high = p[10],
                          .gradient_norm = p[11]}});
  }
  return out;
}

}  // namespace lockstep::rl
