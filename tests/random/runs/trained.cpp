#include "random/runs/trained.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <limits>
#include <sstream>

#include "core/number.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/train/monitor.h"
#include "lockstep/train/progress.h"
#include "train/net.h"

namespace lockstep::test::runs {
namespace {

using train::RunState;

// What is to happen to this process.
struct Interruption {
  std::string how, at, reached;
  int64_t step = 0;
  bool is_ours = false;
  std::ofstream series;  // rank 0's

  void happen() const {
    close(open(reached.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0644));
    if (how == "kill" || (how == "throw" && at == "file")) raise(SIGKILL);
    if (how == "throw") throw std::runtime_error("the test's own error");
    raise(how == "term" ? SIGTERM : SIGUSR1);
  }
};
Interruption* interruption = nullptr;  // of this process, for calls of the file system

void at_file(int64_t call) {
  if (interruption->is_ours && interruption->at == "file" && call == interruption->step) {
    interruption->happen();
  }
}

void come_to(const std::string& place, int64_t step, const std::string& values = {}) {
  if (interruption->series.is_open()) {
    interruption->series << fmt::format("{} {} {}\n", place, step, values) << std::flush;
  }
  if (interruption->is_ours && place == interruption->at && step == interruption->step) {
    interruption->is_ours = false;
    interruption->happen();
  }
}

std::string text_of(const std::map<std::string, double>& values) {
  std::string all;
  for (const auto& [name, value] : values) all += fmt::format(" {}={}", name, number_text(value));
  return all;
}

// Writes down where the run comes to, asks for what it is to ask for, and interrupts it.
struct Watch : train::Callback {
  explicit Watch(const Settings& given) : run(given) {}

  void on_train_begin(const RunState& state) override { come_to("begin", state.step); }
  void on_epoch_begin(const RunState& state) override { come_to("epoch_begin", state.step); }
  void on_step_begin(const RunState& state) override { come_to("step_begin", state.step); }
  void on_step_end(const RunState& state, train::Requests& requests) override {
    const auto is_every = [&](const char* name) {
      return run.has(name) && state.step % run.number(name) == 0;
    };
    if (is_every("ask_evaluation") && state.rank == state.ranks - 1) requests.evaluate();
    if (run.is("ask_in", "step_end")) ask(state, requests, is_every("ask_save"));
    come_to(
        "step_end", state.step,
        fmt::format("epoch={} samples={} skipped={} loss={} rate={} norm={} scale={}", state.epoch,
                    state.samples, state.skipped, number_text(state.loss),
                    number_text(state.learning_rate), number_text(state.gradient_norm.value_or(-1)),
                    number_text(state.loss_scale)));
  }
  void on_evaluate(const RunState& state, train::Requests& requests) override {
    if (run.is("ask_in", "evaluated")) ask(state, requests, run.has("ask_save"));
    come_to("evaluated", state.step, text_of(state.metrics));
  }
  void on_epoch_end(const RunState& state, train::Requests& requests) override {
    if (run.is("ask_in", "epoch_end")) ask(state, requests, run.has("ask_save"));
    come_to("epoch_end", state.step, fmt::format("epoch={}", state.epoch));
  }
  void on_save(const RunState& state, train::Requests&) override { come_to("save", state.step); }
  void on_train_end(const RunState& state) override { come_to("end", state.step); }

  void ask(const RunState& state, train::Requests& requests, bool saves) const {
    if (saves && state.rank == 0) requests.save();
    if (run.has("stop_at") && state.step >= run.number("stop_at") && state.rank == 0) {
      requests.stop();
    }
  }

  Settings run;
};

train::LearningRate schedule_of(const Settings& run) {
  train::Warmup warmup;
  if (run.is("warmup", "steps")) warmup.steps = 3;
  if (run.is("warmup", "ratio")) warmup.ratio = 0.25;
  const auto& kind = run["schedule"];
  if (kind == "cosine") return train::cosine_decay(warmup, 1e-5);
  if (kind == "linear") return train::linear_decay(warmup);
  if (kind == "step") return train::follow(step_lr({.size = 4, .gamma = 0.7}), warmup);
  if (kind == "plateau") return train::on_plateau({.factor = 0.5, .patience = 0});
  if (kind != "one_cycle") return train::constant(warmup);
  return train::follow([](int64_t steps) { return one_cycle_lr({.steps = steps}); }, warmup);
}

std::vector<torch::optim::OptimizerParamGroup> groups_of(torch::nn::Module& model) {
  std::vector<at::Tensor> matrices, vectors;
  for (const auto& each : model.parameters()) (each.dim() > 1 ? matrices : vectors).push_back(each);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices);
  groups.emplace_back(vectors, std::make_unique<torch::optim::AdamWOptions>(5e-3));
  return groups;
}

std::shared_ptr<CommHook> hook_of(const Settings& run) {
  const auto& kind = run["hook"];
  if (kind == "top_k") return std::make_shared<TopK>(TopKOptions{.fraction = 0.1});
  if (kind == "cast") return std::make_shared<CastHook>(at::kHalf);
  if (kind != "power_sgd") return nullptr;
  return std::make_shared<PowerSgd>(
      PowerSgdOptions{.start_iteration = 3, .least_compression = 1.01});
}

std::optional<FsdpOptions> fsdp_of(const Settings& run, const std::string& folder) {
  const auto& kind = run["division"];
  if (kind == "ddp" || kind == "zero") return std::nullopt;
  FsdpOptions options{.min_num_params = 30, .share_memory = kind == "share"};
  if (kind == "gradients") options.sharding = parallel::Sharding::Gradients;
  if (kind == "file") {
    options.offload = parallel::Offload::File;
    options.offload_folder = folder;
  }
  return options;
}

train::Better better_of(const std::string& metric) {
  return metric == "loss" ? train::Better::Lower : train::Better::Higher;
}

TrainerOptions options_of(const Settings& run, const std::string& folder) {
  TrainerOptions options;
  if (run.is("optimizer", "adamw")) {
    options.optimizer = train::adamw({.lr = 0.01, .weight_decay = 0.01});
  } else if (run.is("optimizer", "adam")) {
    options.optimizer = train::adam({.lr = 0.01});
  } else {
    options.optimizer = train::sgd({.lr = 0.02, .momentum = 0.9, .nesterov = true});
  }
  options.learning_rate = schedule_of(run);
  if (run.has("scaling")) options.lr_scaling = LrScaling::Sqrt;
  if (run.has("groups")) options.groups = groups_of;
  const auto& length = run["length"];
  if (length == "epochs" || length == "both") options.epochs = 3;
  if (length == "steps") options.max_steps = 13;
  if (length == "both" || length == "stages_and_steps") options.max_steps = 11;
  if (length.starts_with("stages")) {
    options.stages = {{.name = "a", .data = train_samples(70, 7), .epochs = 1, .batch_size = 5},
                      {.name = "b", .data = train_samples(run.number("samples")), .steps = 5},
                      {.name = "c", .data = train_samples(70, 8), .epochs = 2}};
  }
  options.loader = {.batch_size = run.number("batch"),
                    .seed = 3,
                    .shuffle = run.has("shuffle"),
                    .drop_last = run.has("drop_last"),
                    .prefetch = run.number("prefetch"),
                    .workers = run.number("workers"),
                    .lanes = has_lanes(run) ? run.number("lanes") : 0};
  if (run.has("noise")) {
    options.loader.transforms = {[](data::Batch batch) {
      batch.data = batch.data + 0.1 * at::randn_like(batch.data);
      return batch;
    }};
    options.evaluation.transforms.emplace();
  }
  options.accumulation = run.number("accumulation");
  if (run.has("count")) {
    options.count = [](const data::Batch& batch) {
      return (batch.target != 0).sum().item<int64_t>() + 1;
    };
  }
  if (run.has("clip")) options.max_grad_norm = 0.5;
  if (run.is("precision", "bf16")) options.precision = train::Precision::BFloat16;
  if (run.is("precision", "fp16")) options.precision = train::Precision::Float16;
  options.scaler = {.init_scale = 1048576, .growth_interval = 3};
  if (run.has("bad")) options.non_finite = train::NonFinite::Skip;
  if (run.has("sync_bn")) options.sync_batch_norm = 0;
  options.zero = run.is("division", "zero");
  options.fsdp = fsdp_of(run, folder);
  options.ddp.hook = hook_of(run);
  if (run.is("buffers", "average")) options.ddp.buffers = parallel::Buffers::Average;
  options.evaluation.data = train_samples(run.number("held_out"), 6);
  options.evaluation.every_epochs = run.number("evaluate_epochs");
  options.evaluation.every_steps = run.number("evaluate_steps");
  options.evaluation.batch_size = run.number("evaluate_batch");
  if (run.has("average")) {
    options.weight_average = WeightAverageOptions{.decay = 0.75, .start = 2};
    if (run.is("average", "swa")) options.weight_average->decay.reset();
  }
  if (run.has("early")) {
    options.early_stopping = {.metric = run["early"],
                              .better = better_of(run["early"]),
                              .patience = run.number("patience"),
                              .min_delta = 0.01};
  }
  options.saving = {.directory = folder + "/checkpoints",
                    .every_steps = run.number("save_steps"),
                    .every_epochs = run.number("save_epochs"),
                    .keep_last = run.number("keep"),
                    .async = run.has("async")};
  if (run.has("best")) {
    options.saving.best = {.metric = run["best"],
                           .better = better_of(run["best"]),
                           .restore_at_end = run.has("restore_best")};
  }
  return options;
}

// The models and losses of a run, and its Trainer.
class Training {
 public:
  Training(const Settings& run, World& world, const PreemptionNotice& notice,
           const std::string& folder)
      : run_(run) {
    TrainerOptions options = options_of(run, folder);
    options.notice = &notice;
    const auto watch = std::make_shared<Watch>(run);
    if (run.is("order", "log_last")) options.callbacks.push_back(watch);
    if (run.number("log") > 0) {
      options.callbacks.push_back(std::make_shared<train::Monitoring>(
          world, train::MonitorOptions{.directory = folder + "/log",
                                       .every_steps = run.number("log"),
                                       .tensorboard = run.has("tensorboard")}));
    }
    if (run.has("progress"))
      options.callbacks.push_back(std::make_shared<train::Progress>(screen_));
    if (run.is("order", "log_first")) options.callbacks.push_back(watch);
    if (run.has("parts")) {
      make_parts(world, std::move(options));
    } else {
      options.evaluation.metrics = {std::make_shared<train::Accuracy>()};
      const train::Loss loss = [this](const at::Tensor& output, const at::Tensor& target) {
        return seen(torch::nn::functional::cross_entropy(output, target));
      };
      const train::Model made = run.is("model", "net") ? train::Model(net_) : train::Model(mlp_);
      trainer_ = std::make_unique<Trainer>(world, made, loss, samples(), options);
    }
  }

  Trainer& trainer() { return *trainer_; }
  // What is left, a line each.
  void write_end(const train::Outcome& outcome, std::ostream& out) {
    const auto& state = outcome.state;
    out << fmt::format("ended {}\nstep {}\nsamples {}\nskipped {}\nepoch {}\nevaluated {}\n",
                       name_of(outcome.ended), state.step, state.samples, state.skipped,
                       state.epoch, state.evaluated_at);
    out << fmt::format("loss {}\nmetrics{}\n", number_text(state.loss), text_of(state.metrics));
    if (!outcome.best.empty()) {
      const auto manifest = checkpoint::Checkpoint(outcome.best).manifest();
      out << fmt::format("best {} {}\n", manifest.step,
                         number_text(manifest.metrics.at(run_["best"])));
    }
    const auto write = [&](const std::string& name, const at::Tensor& tensor) {
      const at::Tensor whole = tensor.detach().contiguous();
      const std::string_view bytes(static_cast<const char*>(whole.data_ptr()), whole.nbytes());
      out << fmt::format("{} {:016x}\n", name, std::hash<std::string_view>()(bytes));
    };
    const auto write_all = [&](torch::nn::Module& module) {
      for (const auto& each : module.named_parameters()) write(each.key(), each.value());
      for (const auto& each : module.named_buffers()) write(each.key(), each.value());
    };
    for (const auto* part : run_.has("parts") ? kParts : kOnly) {
      auto* const average = *part == '\0' ? nullptr : trainer_->average(part);
      if (average == nullptr) continue;
      const auto applied = average->apply();
      auto* const fsdp = trainer_->fsdp(part);
      if (fsdp != nullptr) fsdp->unshard();
      write_all(part == kParts[1] ? *other_ : model());
      if (fsdp != nullptr) fsdp->reshard();
    }
    for (const auto* part : run_.has("parts") ? kParts : kOnly) {
      if (*part == '\0') continue;
      if (auto* const fsdp = trainer_->fsdp(part)) fsdp->unshard();
      for (const auto& group : trainer_->optimizer(part).param_groups()) {
        out << fmt::format("rate of {} {}\n", part, number_text(group.options().get_lr()));
      }
    }
    write_all(model());
    if (run_.has("parts")) write_all(*other_);
  }

 private:
  static constexpr const char* kParts[] = {"g", "d"};
  static constexpr const char* kOnly[] = {"model", ""};

  torch::nn::Module& model() {
    return run_.is("model", "net") ? static_cast<torch::nn::Module&>(*net_) : *mlp_;
  }
  data::TensorDataset samples() const { return train_samples(run_.number("samples")); }

  // Interrupts, and is not finite where it is to be.
  at::Tensor seen(const at::Tensor& loss) {
    const auto& state = trainer_->state();
    const bool trains = at::GradMode::is_enabled();
    come_to(trains ? "loss" : "evaluating", state.step);
    const bool is_bad = trains && run_.has("bad") && state.step % 5 == 2 &&
                        (run_.is("bad", "all") || state.rank == 0);
    return is_bad ? loss * std::numeric_limits<float>::infinity() : loss;
  }

  void make_parts(World& world, TrainerOptions options) {
    const auto classes = [](TrainNet& net, const at::Tensor& x) { return call(net, x); };
    const auto loss_of = [classes](TrainNet& net, const data::Batch& batch) {
      return torch::nn::functional::cross_entropy(classes(net, batch.data), batch.target);
    };
    const auto fooled = [this, classes](const data::Batch& batch) {
      const at::Tensor made = classes(net_, batch.data);
      return 0.1 * classes(other_, torch::cat({made, made}, 1)).pow(2).mean();
    };
    options.evaluation.measure = [this, classes, loss_of](const data::Batch& batch) {
      const at::Tensor loss = seen(loss_of(net_, batch));
      const at::Tensor right = classes(other_, batch.data).argmax(1) == batch.target;
      return std::map<std::string, double>{
          {"loss", loss.item<double>()}, {"accuracy", right.to(at::kDouble).mean().item<double>()}};
    };
    std::vector<train::Part> parts{
        {.name = "g", .model = net_},
        {.name = "d", .model = other_, .optimizer = train::sgd({.lr = 0.02, .momentum = 0.5})}};
    const auto step = [this, loss_of, fooled](train::Step& one) {
      one.update("d", [&](const data::Batch& batch) { return seen(loss_of(other_, batch)); });
      if (one.state().step % 3 == 1) return;
      one.update("g",
                 [&](const data::Batch& batch) { return loss_of(net_, batch) + fooled(batch); });
    };
    trainer_ = std::make_unique<Trainer>(world, std::move(parts), step, samples(), options);
  }

  Settings run_;
  TrainNet net_, other_;
  torch::nn::Sequential mlp_{torch::nn::Linear(6, 16), torch::nn::Tanh(), torch::nn::Linear(16, 3)};
  std::ostringstream screen_;
  std::unique_ptr<Trainer> trainer_;
};

}  // namespace

int train(const Settings& run, const Settings& start, const std::string& folder) {
  const Settings all = run.with(start);
  const PreemptionNotice notice;  // before the World
  World world = World::from_env({.timeout = std::chrono::seconds(60)});
  Interruption what{.how = start["how"],
                    .at = start["at"],
                    .reached = folder + "/" + kReached,
                    .step = start.number("step")};
  what.is_ours =
      start.has("how") && (start.is("rank", "all") || start.number("rank") == world.rank());
  if (world.is_main()) what.series.open(folder + "/" + kSeries, std::ios::app);
  interruption = &what;
  seed_everything(1, world);
  Training training(all, world, notice, folder);
  watch_files(at_file);
  const auto outcome = training.trainer().run();
  const int64_t calls = watch_files(nullptr);
  if (what.series.is_open()) what.series << fmt::format("file {} \n", calls);
  std::ofstream end(folder + "/" + kEnd + std::to_string(world.rank()));
  training.write_end(outcome, end);
  return outcome.exit_status();
}

}  // namespace lockstep::test::runs
