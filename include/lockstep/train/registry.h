// The models, data sets, losses, metrics and optimizers that a configuration may name: those of the
// library, and what a program adds. A value, passed to run(): there is no global registry.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/standard_scaler.h"
#include "lockstep/train/config.h"
#include "lockstep/train/loss.h"
#include "lockstep/train/metric.h"
#include "lockstep/train/model.h"
#include "lockstep/train/optimizer.h"

namespace lockstep::train {

// The data of a run.
struct RunData {
  std::shared_ptr<const data::Dataset> training = nullptr;
  std::shared_ptr<const data::Dataset> validation = nullptr;  // null: there is none of its own
  // Targets are numbers below it: classes, or tokens; 0: targets are values.
  int64_t classes = 0;
  // By which the data were scaled, to be saved with the run; null: they were not.
  std::shared_ptr<data::StandardScaler> scaler = nullptr;
  // For tokens: the file or folder of what made them (lockstep/text/tokenizer.h); empty: not known.
  std::string tokenizer = {};
  // Of tokens: the one after each document, where their folder says so.
  std::optional<int64_t> separator = {};
  // Opens what a stage of training.curriculum names (`path`, `targets_path`), with classes numbered
  // as here; null: the function of the kind is called once more.
  std::function<std::shared_ptr<const data::Dataset>(const DataConfig&)> more = nullptr;
};

// How samples look, for a model that has to fit them.
struct SampleShape {
  std::vector<int64_t> data = {};    // sizes of one sample
  std::vector<int64_t> target = {};  // of one target
  int64_t classes = 0;               // as RunData has it

  // Elements of a sample.
  int64_t features() const;
  // What a model gives for a sample: one output for each class, or for each value of a target.
  int64_t outputs() const;
};

// Names with what makes the object. Each function is called in the same way on every rank, after
// the seed is set.
class Registry {
 public:
  // Keys of the configuration that go with a name, and what makes the object.
  using Keys = ConfigExtensions::Keys;
  using MakeModel = std::function<Model(const RunConfig&, const SampleShape&)>;
  using MakeData = std::function<RunData(const RunConfig&, const comm::World&)>;
  using MakeLoss = std::function<Loss(const RunConfig&)>;
  using MakeMetric = std::function<std::shared_ptr<Metric>(const RunConfig&, const SampleShape&)>;
  using ChooseOptimizer = std::function<MakeOptimizer(const RunConfig&)>;

  // With what the library has.
  Registry();

  // Further values of model.kind, data.kind, optimizer.kind, training.loss and training.metrics,
  // with keys of their own, which RunConfig::extra_value() gives. Throw ConfigError for a name that
  // is there already.
  Registry& add_model(const std::string& kind, MakeModel make, Keys keys = {});
  Registry& add_data(const std::string& kind, MakeData make, Keys keys = {});
  Registry& add_optimizer(const std::string& kind, ChooseOptimizer choose, Keys keys = {});
  Registry& add_loss(const std::string& name, MakeLoss make);
  Registry& add_metric(const std::string& name, MakeMetric make);
  // A section of the program's own.
  Registry& add_section(const std::string& name, Keys keys);

  // For load_config(): what was added.
  const ConfigExtensions& extensions() const { return extensions_; }

  // What a configuration asks for. Throw ConfigError for a name that was not added.
  Model model(const RunConfig& config, const SampleShape& shape) const;
  RunData data(const RunConfig& config, const comm::World& world) const;
  MakeOptimizer optimizer(const RunConfig& config) const;
  Loss loss(const RunConfig& config, const SampleShape& shape) const;
  std::vector<std::shared_ptr<Metric>> metrics(const RunConfig& config,
                                               const SampleShape& shape) const;

 private:
  std::map<std::string, MakeModel> models_;
  std::map<std::string, MakeData> data_;
  std::map<std::string, ChooseOptimizer> optimizers_;
  std::map<std::string, MakeLoss> losses_;
  std::map<std::string, MakeMetric> metrics_;
  ConfigExtensions extensions_;
};

}  // namespace lockstep::train

namespace lockstep {
using train::Registry;
}  // namespace lockstep
