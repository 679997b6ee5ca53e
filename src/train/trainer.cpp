#include "lockstep/train/trainer.h"

#include <fmt/format.h>

#include <utility>

#include "lockstep/core/error.h"
#include "train/training.h"

namespace lockstep::train {
namespace {

template <class Function>
Function given(Function function, std::string_view what) {
  if (!function) throw ConfigError(fmt::format("[train] the {} is an empty function", what));
  return function;
}

StepFunction one_update(LossOfBatch loss) {
  return [loss = std::move(loss)](Step& step) { step.update("model", loss); };
}

LossOfBatch of_batch(const Model& model, Loss loss) {
  if (!model) return nullptr;
  return [model, loss = std::move(loss)](const data::Batch& batch) {
    return loss(model.forward(batch.data), batch.target);
  };
}

// With an evaluation of the model's outputs, unless the program has its own.
TrainerOptions measured(TrainerOptions options, const Model& model, const Loss& loss) {
  auto& evaluation = options.evaluation;
  if (evaluation.measure) return options;
  evaluation.measure = [model, loss, metrics = evaluation.metrics](const data::Batch& batch) {
    const at::Tensor output = model.forward(batch.data);
    for (const auto& metric : metrics) metric->update(output, batch.target);
    return std::map<std::string, double>{{"loss", loss(output, batch.target).item<double>()}};
  };
  return options;
}

TrainerOptions measured(TrainerOptions options, const LossOfBatch& loss) {
  auto& evaluation = options.evaluation;
  if (evaluation.measure) return options;
  if (!evaluation.metrics.empty()) {
    throw ConfigError(
        "[train] a loss of a batch does not show the model's outputs, which metrics are of: give a "
        "Loss, or Evaluation::measure that counts them");
  }
  evaluation.measure = [loss](const data::Batch& batch) {
    return std::map<std::string, double>{{"loss", loss(batch).item<double>()}};
  };
  return options;
}

}  // namespace

at::Tensor Model::forward(const at::Tensor& input) const {
  if (!forward_) {
    throw ConfigError(
        "[train] the model's forward() does not take one tensor and give one: construct Model with "
        "a function that does, or give the Trainer a loss of a batch");
  }
  return forward_(input);
}

double Step::update(std::string_view part, const LossOfBatch& loss) {
  return training_.update(part, loss);
}
const RunState& Step::state() const { return training_.state(); }

std::string_view name_of(Ended ended) {
  switch (ended) {
    case Ended::Finished:
      return "finished";
    case Ended::Stopped:
      return "stopped";
    case Ended::Early:
      return "early stopping";
    case Ended::TimeLimit:
      return "time limit";
    case Ended::Preempted:
      return "preempted";
  }
  return "";
}

int Outcome::exit_status() const { return ended == Ended::Preempted ? kRequeueStatus : 0; }

Trainer::Trainer(const comm::World& world, const Model& model, Loss loss, DataSource data,
                 TrainerOptions options)
    : Trainer(world, {{.name = "model", .model = model}},
              one_update(of_batch(model, given(loss, "loss"))), std::move(data),
              measured(std::move(options), model, loss)) {}

Trainer::Trainer(const comm::World& world, const Model& model, LossOfBatch loss, DataSource data,
                 TrainerOptions options)
    : Trainer(world, {{.name = "model", .model = model}}, one_update(given(loss, "loss")),
              std::move(data), measured(std::move(options), loss)) {}

Trainer::Trainer(const comm::World& world, std::vector<Part> parts, StepFunction step,
                 DataSource data, TrainerOptions options)
    : training_(std::make_unique<Training>(world, std::move(parts), given(std::move(step), "step"),
                                           std::move(data), std::move(options))) {}
Trainer::~Trainer() = default;

void Trainer::track(const std::string& name, std::shared_ptr<checkpoint::Stateful> object) {
  training_->track(name, std::move(object));
}
void Trainer::track(const std::string& name, const at::Generator& generator) {
  training_->track(name, generator);
}

Outcome Trainer::run() { return training_->run(); }
std::map<std::string, double> Trainer::evaluate() { return training_->evaluate_for_program(); }
const RunState& Trainer::state() const { return training_->state(); }
const parallel::Ddp& Trainer::ddp(std::string_view part) const {
  const TrainedPart& trained = training_->part(part);
  if (trained.ddp) return *trained.ddp;
  throw ConfigError(
      fmt::format("[train] part '{}' is sharded by an Fsdp, and has no Ddp: ask for fsdp()", part));
}
parallel::Fsdp* Trainer::fsdp(std::string_view part) const {
  return training_->part(part).fsdp.get();
}
parallel::WeightAverage* Trainer::average(std::string_view part) const {
  return training_->part(part).average.get();
}
torch::optim::Optimizer& Trainer::optimizer(std::string_view part) const {
  return *training_->part(part).optimizer;
}

}  // namespace lockstep::train
