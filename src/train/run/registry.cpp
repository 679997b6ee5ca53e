#include "lockstep/train/registry.h"

#include <fmt/format.h>

#include "lockstep/checkpoint/box.h"
#include "lockstep/core/error.h"
#include "lockstep/train/metrics.h"
#include "train/run/builtin.h"

namespace lockstep::train {
namespace {

template <class Make>
void add(std::map<std::string, Make>& all, const std::string& key, const std::string& name,
         Make make) {
  if (!make) throw ConfigError(fmt::format("[registry] {} '{}' has no function", key, name));
  if (!all.emplace(name, std::move(make)).second) {
    throw ConfigError(
        fmt::format("[registry] {} '{}' is there already: choose another name", key, name));
  }
}

template <class Make>
const Make& found(const std::map<std::string, Make>& all, const std::string& key,
                  const std::string& name) {
  const auto one = all.find(name);
  if (one != all.end()) return one->second;
  std::string names;
  for (const auto& [known, make] : all) names += (names.empty() ? "" : ", ") + known;
  throw ConfigError(
      fmt::format("[registry] {}: '{}' is not among those of this program: {}", key, name, names));
}

}  // namespace

int64_t SampleShape::features() const { return checkpoint::elements(data); }
int64_t SampleShape::outputs() const {
  return classes > 0 ? classes : checkpoint::elements(target);
}

Registry::Registry() {
  models_ = builtin_models();
  data_ = builtin_data();
  optimizers_ = builtin_optimizers();
  losses_ = builtin_losses();
}

Registry& Registry::add_model(const std::string& kind, MakeModel make, Keys keys) {
  add(models_, "model.kind", kind, std::move(make));
  extensions_.models[kind] = std::move(keys);
  return *this;
}
Registry& Registry::add_data(const std::string& kind, MakeData make, Keys keys) {
  add(data_, "data.kind", kind, std::move(make));
  extensions_.datasets[kind] = std::move(keys);
  return *this;
}
Registry& Registry::add_optimizer(const std::string& kind, ChooseOptimizer choose, Keys keys) {
  add(optimizers_, "optimizer.kind", kind, std::move(choose));
  extensions_.optimizers[kind] = std::move(keys);
  return *this;
}
Registry& Registry::add_loss(const std::string& name, MakeLoss make) {
  add(losses_, "training.loss", name, std::move(make));
  extensions_.losses.push_back(name);
  return *this;
}
Registry& Registry::add_metric(const std::string& name, MakeMetric make) {
  add(metrics_, "training.metrics", name, std::move(make));
  extensions_.metrics.push_back(name);
  return *this;
}
Registry& Registry::add_section(const std::string& name, Keys keys) {
  if (!extensions_.sections.emplace(name, std::move(keys)).second) {
    throw ConfigError(fmt::format("[registry] section '{}' is there already", name));
  }
  return *this;
}

Model Registry::model(const RunConfig& config, const SampleShape& shape) const {
  Model made = found(models_, "model.kind", config.model.kind)(config, shape);
  if (made) return made;
  throw ConfigError(
      fmt::format("[registry] the function of model.kind '{}' returned none", config.model.kind));
}
RunData Registry::data(const RunConfig& config, const comm::World& world) const {
  RunData made = found(data_, "data.kind", config.data.kind)(config, world);
  if (made.training != nullptr) return made;
  throw ConfigError(fmt::format(
      "[registry] the function of data.kind '{}' returned none to train on", config.data.kind));
}
MakeOptimizer Registry::optimizer(const RunConfig& config) const {
  return found(optimizers_, "optimizer.kind", config.optimizer.kind)(config);
}
Loss Registry::loss(const RunConfig& config, const SampleShape& shape) const {
  std::string name = config.training.loss;
  if (name == "auto") name = shape.classes > 0 ? "cross_entropy" : "mse";
  if (config.training.label_smoothing > 0 && name == "mse") {
    throw ConfigError(
        "[registry] training.label_smoothing is of cross_entropy, and the targets of these data "
        "are values, whose training.loss is mse: leave it out");
  }
  return found(losses_, "training.loss", name)(config);
}

std::vector<std::shared_ptr<Metric>> Registry::metrics(const RunConfig& config,
                                                       const SampleShape& shape) const {
  std::vector<std::shared_ptr<Metric>> all;
  for (const auto& name : config.training.metrics) {
    const auto own = metrics_.find(name);
    if (own != metrics_.end()) {
      all.push_back(own->second(config, shape));
    } else {
      all.push_back(make_metric(name, {.top_k = config.training.top_k, .classes = shape.classes}));
    }
  }
  return all;
}

}  // namespace lockstep::train
