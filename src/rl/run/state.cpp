#include "rl/run/state.h"

#include <nlohmann/json.hpp>

namespace lockstep::rl {
namespace {

using Json = nlohmann::ordered_json;

std::string as_line(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Json array_of(const EvaluatedTrial& trial) {
  const Json told = trial.told ? Json(*trial.told) : Json();
  return {trial.reward, told, trial.calls, trial.good_calls, trial.called, trial.failed};
}

EvaluatedTrial trial_of(const Json& array) {
  return {.reward = array.at(0),
          .called = array.at(4).get<std::vector<std::string>>(),
          .calls = array.at(2),
          .good_calls = array.at(3),
          .failed = array.at(5).get<std::vector<std::string>>(),
          .told = array.at(1).is_null() ? std::nullopt : std::optional(array.at(1).get<bool>())};
}

}  // namespace

std::string to_json(const EvaluatedTrial& trial) { return as_line(array_of(trial)); }

EvaluatedTrial trial_from_json(const std::string& text) { return trial_of(Json::parse(text)); }

std::string RunState::to_json() const {
  Json out{{"position", position},  {"iterations", iterations}, {"log_lines", log_lines},
           {"rows", Json::array()}, {"curve", Json::array()},   {"ends", ends},
           {"seconds", seconds},    {"started", started},       {"all_seconds", all_seconds}};
  for (const auto& row : rows) {
    Json cells = Json::array();
    for (const auto& cell : row) {
      Json trials = Json::array();
      for (const auto& trial : cell.trials) trials.push_back(array_of(trial));
      cells.push_back(std::move(trials));
    }
    out["rows"].push_back(std::move(cells));
  }
  for (const auto& point : curve) {
    const Learnt& l = point.learnt;
    out["curve"].push_back({point.stage, point.iteration, l.reward, l.equal_share, l.kept, l.tokens,
                            l.updated, l.kl, l.entropy, l.clipped_low, l.clipped_high,
                            l.gradient_norm, point.own_reward ? Json(*point.own_reward) : Json()});
  }
  return as_line(out);
}

RunState RunState::from_json(const std::string& text) {
  const Json in = Json::parse(text);
  RunState out{.position = in.at("position"),
               .iterations = in.at("iterations"),
               .log_lines = in.at("log_lines")};
  in.at("ends").get_to(out.ends);
  in.at("seconds").get_to(out.seconds);
  out.started = in.value("started", "");
  out.all_seconds = in.value("all_seconds", Seconds());
  for (const auto& row : in.at("rows")) {
    out.rows.emplace_back();
    for (const auto& cell : row) {
      auto& trials = out.rows.back().emplace_back().trials;
      for (const auto& trial : cell) trials.push_back(trial_of(trial));
    }
  }
  for (const auto& p : in.at("curve")) {
    out.curve.push_back({p[0],
                         p[1],
                         p[12].is_null() ? std::nullopt : std::optional(p[12].get<double>()),
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
