#include "random/training/training.h"

#include <torch/torch.h>

#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/fused_sgd.h"
#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;
constexpr int64_t kRows = 3;

template <class Kind, class Options>
std::unique_ptr<Optimizer> made(Groups groups, const Options& options) {
  return std::make_unique<Kind>(std::move(groups), options);
}

Batch default_batch(const Program& program, const Moment& moment) {
  Random random(program.seed + 7919);
  uint64_t seed = random.next();
  for (const int number : {moment.lane, moment.step, moment.micro}) {
    seed = Random(seed ^ static_cast<uint64_t>(number + 1)).next();
  }
  auto generator = at::detail::createCPUGenerator(seed);
  return {at::randn({kRows, kFeatures}, generator, at::kDouble),
          at::randn({kRows}, generator, at::kDouble)};
}

Batch whole_batch(const Program& program, Moment moment) {
  std::vector<at::Tensor> data, targets;
  for (moment.lane = 0; moment.lane < program.parts(); ++moment.lane) {
    const auto batch = default_batch(program, moment);
    data.push_back(batch.data);
    targets.push_back(batch.target);
  }
  return {at::cat(data), at::cat(targets)};
}

Lane make_lane(Training& training, int rank) {
  Lane lane{.rank = rank, .steps = training.program.steps, .models = {}, .losses = {}};
  for (int i = 0; i < training.models; ++i) {
    Model model;
    model.net = std::make_shared<Net>(training.program, static_cast<uint64_t>(i), training.group);
    for (const auto& feature : training.features) feature->build(training, lane, *model.net);
    for (const auto& feature : training.features) feature->built(training, *model.net);
    lane.models.push_back(std::move(model));
  }
  return lane;
}

// The parameters of the first group, which are taken out; all where the program has one group.
std::vector<at::Tensor> first_group(const Program& program, std::vector<at::Tensor>& parameters) {
  if (!program.has("param_groups")) return std::exchange(parameters, {});
  std::vector<at::Tensor> first;
  for (size_t i = parameters.size(); i-- > 0;) {
    if (i % 2 == 0) continue;
    first.push_back(parameters[i]);
    parameters.erase(parameters.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return first.empty() ? std::exchange(parameters, {}) : first;
}

// Where all ranks have one copy none writes to it between steps.
bool shares_parameters(const Program& program) {
  for (const auto* name : {"load", "move_parameters", "weight_average", "resume", "averager"}) {
    if (program.has(name)) return false;
  }
  return Random(program.feature("zero")->seed).chance(0.5);
}

void attach(Training& training, Model& model) {
  if (training.alone) {
    watch(model);
  } else if (training.sharding) {
    model.fsdp =
        std::make_unique<parallel::Fsdp>(*model.net, model.group, training.sharding(*model.net));
  } else {
    if (training.program.has("scripted")) model.script = script_of(training, *model.net);
    if (training.hook) model.hook = training.hook();
    model.ddp = ddp_of(training, model);
  }
  const auto make = [part = training.program.optimizer](Groups groups) {
    return make_optimizer(part, std::move(groups));
  };
  // libtorch's optimizers step a parameter that they are given twice, twice.
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : model.parameters()) {
    const auto is_it = [&](const at::Tensor& other) { return other.is_same(parameter); };
    if (parameter.requires_grad() && std::ranges::none_of(parameters, is_it)) {
      parameters.push_back(parameter);
    }
  }
  Groups groups;
  groups.emplace_back(first_group(training.program, parameters));
  if (!parameters.empty()) groups.emplace_back(std::move(parameters));
  if (training.on_rank() && training.program.has("zero")) {
    auto zero = std::make_unique<parallel::ZeroOptimizer>(
        std::move(groups), training.group, make,
        parallel::ZeroOptions{.share_parameters = shares_parameters(training.program)});
    model.zero = zero.get();
    model.optimizer = std::move(zero);
  } else {
    model.optimizer = make(std::move(groups));
  }
  for (auto& group : model.optimizer->param_groups()) {
    if (&group != model.optimizer->param_groups().data()) group.options().set_lr(0.005);
  }
}

}  // namespace

std::unique_ptr<Ddp> ddp_of(const Training& training, const Model& model) {
  DdpOptions options = training.options;
  options.hook = model.hook;
  return std::make_unique<Ddp>(model.module(), model.group, options);
}

at::Tensor losses(Training& training, const std::vector<Lane*>& lanes, size_t model, int micro) {
  std::vector<Net*> nets;
  std::vector<Batch> batches;
  std::vector<Moment> moments;
  for (Lane* lane : lanes) {
    moments.push_back({.lane = lane->rank,
                       .lanes = training.program.parts(),
                       .step = training.step,
                       .micro = micro,
                       .seed = training.program.seed});
    nets.push_back(lane->models[model].net.get());
    batches.push_back(training.whole_batch ? whole_batch(training.program, moments.back())
                                           : default_batch(training.program, moments.back()));
    for (const auto& feature : training.features) {
      feature->batch(training, *lane, moments.back(), batches.back());
    }
  }
  std::vector<at::Tensor> outputs;
  std::function<void()> forward = [&] { outputs = Net::forward(nets, batches, moments); };
  for (const auto& feature : training.features) {
    forward = [&training, &feature, inner = forward] { feature->around_forward(training, inner); };
  }
  forward();
  at::Tensor sum;
  for (size_t i = 0; i < lanes.size(); ++i) {
    const auto each = (outputs[i] - batches[i].target).square();
    auto loss = each.mean();
    lanes[i]->losses.push_back(loss.item<double>());
    for (const auto& feature : training.features) feature->loss(training, *lanes[i], each, loss);
    sum = sum.defined() ? sum + loss : loss;
  }
  return sum;
}

namespace {

void clear_gradients(Training& training) {
  for (auto& lane : training.lanes) {
    if (lane.active) continue;
    // As its part of the others' step does.
    for (Model& model : lane.models) model.net->zero_grad();
  }
  for (Lane* lane : training.active()) {
    for (Model& model : lane->models) {
      bool cleared = false;
      for (const auto& feature : training.features) {
        cleared = cleared || feature->clear(training, *lane, model);
      }
      if (cleared) continue;
      if (model.fsdp) {
        model.fsdp->zero_grad();
        for (const auto& parameter : model.parameters()) parameter.mutable_grad().reset();
      } else if (model.ddp) {
        model.ddp->zero_grad();
      } else {
        model.net->zero_grad();
        model.reached.clear();
      }
    }
  }
}

void update(Training& training) {
  for (Lane& lane : training.lanes) {
    if (!lane.active && !training.rules.everybody_updates) continue;
    for (Model& model : lane.models) {
      bool updated = false;
      for (const auto& feature : training.features) {
        updated = updated || feature->update(training, lane, model);
      }
      if (!updated) model.optimizer->step();
    }
  }
}

}  // namespace

bool add_to(at::Tensor& sum, at::Tensor& loss, const Training& training) {
  // Ranks may add in any order.
  if (sum.defined()) loss = training.lanes[0].rank % 2 == 0 ? sum + loss : loss + sum;
  sum = loss;
  return training.model + 1 == training.models;
}

void rest_of_step(Training& training) {
  for (const auto& feature : training.features) feature->after_backward(training);
  update(training);
  for (const auto& feature : training.features) feature->after_step(training);
}

namespace {

void run_step(Training& training) {
  for (const auto& feature : training.features) feature->begin_step(training);
  clear_gradients(training);
  if (training.on_rank() && training.program.lanes() > 0) {
    run_lanes(training);
    return rest_of_step(training);
  }
  const auto active = training.active();
  int rounds = 0;
  for (const Lane* lane : active) rounds = std::max(rounds, training.micros(lane->rank));
  for (training.round = rounds; training.round-- > 0;) {
    const int round = training.round;
    std::vector<Lane*> taking;
    for (Lane* lane : active) {
      if (training.micros(lane->rank) > round) taking.push_back(lane);
    }
    for (int backward = 0; backward < training.backwards; ++backward) {
      std::vector<parallel::Hold> holds;
      at::Tensor sum;
      for (int model = 0; model < training.models; ++model) {
        training.model = model;
        if (round > 0 && training.on_rank()) holds.push_back(taking[0]->models[model].hold());
        auto loss = losses(training, taking, model, round + 10 * backward + 50 * model);
        if (training.program.has("two_forwards")) {
          loss = loss + losses(training, taking, model, round + 10 * backward + 50 * model + 25);
        }
        if (training.is_joint && !add_to(sum, loss, training)) continue;
        bool done = false;
        for (const auto& feature : training.features) {
          done = done || feature->backward(training, loss);
        }
        if (!done) loss.backward();
        // Lanes are averaged once, when all have run both.
        const bool is_last = training.program.lanes() == 0 || backward + 1 == training.backwards;
        if (round == 0 && training.alone && is_last) {
          for (int i = training.is_joint ? 0 : model; i <= model; ++i) average(training, i);
        }
      }
    }
  }
  rest_of_step(training);
}

}  // namespace

std::vector<Lane*> Training::active() {
  std::vector<Lane*> some;
  for (auto& lane : lanes) {
    if (lane.active) some.push_back(&lane);
  }
  return some;
}

std::vector<Lane*> Training::stepping() {
  if (!rules.everybody_rests) return active();
  std::vector<Lane*> all;
  for (auto& lane : lanes) all.push_back(&lane);
  return all;
}

std::vector<std::string> optimizer_names() {
  return {"sgd",     "plain_sgd", "adam",      "amsgrad",    "adamw",
          "rmsprop", "adagrad",   "fused_sgd", "fused_adam", "fused_adamw"};
}

std::unique_ptr<Optimizer> make_optimizer(const Part& part, Groups groups) {
  using namespace torch::optim;
  Random random(part.seed);
  const double lr = random.pick({0.01, 0.03}), decay = random.pick({0.0, 0.1});
  const double momentum = random.pick({0.0, 0.9});
  const auto sgd = SGDOptions(lr).momentum(momentum).weight_decay(decay).nesterov(
      momentum > 0 && random.chance(0.5));
  // A large eps: rounding noise in a gradient that is zero does not become a step of its own.
  const auto adam = AdamOptions(lr).weight_decay(decay).eps(1e-3);
  const auto adamw = AdamWOptions(lr).weight_decay(decay).eps(1e-3);
  if (part.name == "sgd") return made<SGD>(std::move(groups), sgd);
  if (part.name == "plain_sgd") return made<SGD>(std::move(groups), SGDOptions(lr));
  if (part.name == "adam") return made<Adam>(std::move(groups), adam);
  if (part.name == "amsgrad") return made<Adam>(std::move(groups), AdamOptions(adam).amsgrad(true));
  if (part.name == "adamw") return made<AdamW>(std::move(groups), adamw);
  if (part.name == "rmsprop") return made<RMSprop>(std::move(groups), RMSpropOptions(lr).eps(1e-3));
  if (part.name == "adagrad") return made<Adagrad>(std::move(groups), AdagradOptions(lr).eps(1e-3));
  if (part.name == "fused_sgd") return made<parallel::FusedSGD>(std::move(groups), sgd);
  if (part.name == "fused_adam") return made<parallel::FusedAdam>(std::move(groups), adam);
  if (part.name == "fused_adamw") return made<parallel::FusedAdamW>(std::move(groups), adamw);
  throw std::invalid_argument("there is no optimizer " + part.name);
}

std::vector<State> train(const Program& program, const Group& group, Who who) {
  const bool alone = who != Who::Rank;
  Training training{.program = program,
                    .group = alone ? Group() : group,
                    .alone = alone,
                    .whole_batch = who == Who::WholeBatch,
                    .options = {},
                    .rules = {},
                    .lanes = {},
                    .features = make_features(program)};
  for (const auto& feature : training.features) feature->plan(training);
  const int first = alone ? 0 : group.rank(), count = who == Who::AllRanks ? program.parts() : 1;
  for (int i = 0; i < count; ++i) training.lanes.push_back(make_lane(training, first + i));
  for (auto& lane : training.lanes) {
    for (auto& model : lane.models) {
      model.group = training.group;
      // All losses share a backward, but not a group.
      const Part* joint = program.feature("joint");
      const bool is_apart =
          joint != nullptr && joint->seed % 2 == 0 && &model != lane.models.data();
      if (is_apart && training.on_rank()) model.group = training.group.split(0);
      attach(training, model);
    }
  }
  for (const auto& feature : training.features) feature->begin(training);
  for (training.step = 0;; ++training.step) {
    for (auto& lane : training.lanes) lane.active = training.step < lane.steps;
    if (training.active().empty()) break;
    run_step(training);
  }
  for (const auto& feature : training.features) feature->end(training);
  std::vector<State> states;
  for (const auto& lane : training.lanes) states.push_back(state_of(lane, training.group));
  return states;
}

}  // namespace lockstep::test::training
