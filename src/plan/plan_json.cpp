// A plan for programs.
#include <nlohmann/json.hpp>

#include "lockstep/plan/plan.h"

namespace lockstep::plan {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const Memory& m) {
  return {{"parameters", m.parameters},
          {"gradients", m.gradients},
          {"optimizer", m.optimizer},
          {"gathered", m.gathered},
          {"communication", m.communication},
          {"activations", m.activations},
          {"working", m.working},
          {"data", m.data},
          {"tensors", m.tensors},
          {"margin", m.margin},
          {"reserved", m.reserved},
          {"total", m.total},
          {"available", m.available},
          {"fits", m.fits()}};
}

Json json_of(const StepTime& t) {
  return {{"total", t.total},           {"computation", t.computation}, {"slowdown", t.slowdown},
          {"straggling", t.straggling}, {"waiting", t.waiting},         {"update", t.update}};
}

Json json_of(const PlanRow& row) {
  return {{"strategy", name_of(row.strategy)},
          {"config", config_of(row.strategy)},
          {"ranks", row.ranks},
          {"memory_bytes", json_of(row.memory)},
          {"step_seconds", json_of(row.time)},
          {"samples_per_second", row.samples_per_second},
          {"efficiency", row.efficiency}};
}

Json all_of(const std::vector<PlanRow>& rows) {
  Json out = Json::array();
  for (const auto& row : rows) out.push_back(json_of(row));
  return out;
}

// null: there is none.
Json evaluation_of(const Training& training) {
  if (!training.evaluation_batch) return {};
  return *training.evaluation_batch > 0 ? *training.evaluation_batch : training.batch;
}

Json all_of(const std::vector<Remedy>& remedies) {
  Json out = Json::array();
  for (const auto& one : remedies) {
    out.push_back({{"change", one.change},
                   {"strategy", name_of(one.strategy)},
                   {"memory_bytes", json_of(one.memory)},
                   {"least_ranks", one.least_ranks}});
  }
  return out;
}

}  // namespace

std::string plan_json(const Plan& plan) {
  Json out = {{"model", plan.model.name},
              {"parameters", plan.model.elements()},
              {"trained_parameters", plan.model.trained()},
              {"tokens_per_sample", plan.model.tokens},
              {"device", plan.machine.device.name},
              {"network", plan.machine.network.name},
              {"devices_per_node", plan.machine.devices_per_node},
              {"is_measured", plan.machine.is_measured || plan.training.measured_step > 0},
              {"ranks", plan.ranks},
              {"batch", plan.training.batch},
              {"accumulation", plan.training.accumulation},
              {"evaluation_batch", evaluation_of(plan.training)},
              {"feedback", name_of(plan.training.feedback)},
              {"best", plan.best ? json_of(*plan.best) : Json()},
              {"strategies", all_of(plan.strategies)},
              {"sizes", all_of(plan.sizes)},
              {"least_ranks", plan.least_ranks},
              {"knee", plan.knee},
              {"remedies", all_of(plan.remedies)}};
  return out.dump(2) + "\n";
}

}  // namespace lockstep::plan
