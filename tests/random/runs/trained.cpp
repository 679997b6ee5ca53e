#include "random/runs/trained.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <limits>
#include <sstream>
#include <thread>

#include "core/number.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/train/monitor.h"
#include "lockstep/train/progress.h"
#include "random/runs/options.h"
#include "train/net.h"

namespace lockstep::test::runs {
namespace {

using train::RunState;

constexpr std::chrono::milliseconds kTime{300};  // that a start has, which is to take longer

// What is to happen to this process.
struct Interruption {
  std::string how, at, reached;
  int64_t step = 0;
  bool is_twice = false;
  std::atomic<bool> is_ours = false;
  std::atomic<bool> owes_another = false;  // a second signal, at the next place
  std::atomic<int64_t> batches = 0;        // that were made
  std::ofstream series;                    // rank 0's
  pthread_t main = pthread_self();         // other threads block the signals

  void happen() {
    is_ours = false;
    owes_another = is_twice;
    close(open(reached.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0644));
    if (how == "kill" || (how == "throw" && at == "file")) raise(SIGKILL);
    if (how == "throw") throw std::runtime_error("the test's own error");
    if (how == "time") std::this_thread::sleep_for(kTime);
    if (how == "usr1" || how == "term") pthread_kill(main, how == "term" ? SIGTERM : SIGUSR1);
  }
};
Interruption* interruption = nullptr;  // of this process, for calls of the file system

void at_file(int64_t call) {
  if (interruption->is_ours && interruption->at == "file" && call == interruption->step) {
    interruption->happen();
  }
}

void at_batch() {
  const int64_t call = ++interruption->batches;
  if (interruption->is_ours && interruption->at == "loading" && call == interruption->step) {
    interruption->happen();
  }
}

void come_to(const std::string& place, int64_t step, const std::string& values = {}) {
  if (interruption->series.is_open()) {
    interruption->series << fmt::format("{} {} {}\n", place, step, values) << std::flush;
  }
  if (interruption->is_ours && place == interruption->at && step == interruption->step) {
    interruption->happen();
  } else if (interruption->owes_another.exchange(false)) {
    raise(interruption->how == "term" ? SIGUSR1 : SIGTERM);
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
    if (queue.defined()) queue.mul_(0.5).add_(at::randn({3}, generator, at::kDouble) + state.rank);
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
  // Tracked, and of this rank alone; undefined: none.
  at::Tensor queue;
  at::Generator generator;
};

// A TrainNet, and parameters that no batch uses or that some do.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(const Settings& run) : net(register_module("net", TrainNet())) {
    if (!run.has("unused")) return;
    sometimes = register_parameter("sometimes", torch::ones({3}));
    never = register_parameter("never", torch::ones({2, 3}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = call(net, x);
    return sometimes.defined() && x.sum().item<double>() > 0 ? y * sometimes : y;
  }
  TrainNet net;
  at::Tensor sometimes, never;
};
TORCH_MODULE(Net);

// The models and losses of a run, and its Trainer.
class Training {
 public:
  Training(const Settings& run, World& world, const PreemptionNotice& notice,
           const std::string& folder)
      : run_(run) {
    TrainerOptions options = options_of(run, folder);
    options.notice = &notice;
    const auto watch = std::make_shared<Watch>(run);
    if (run.has("tracked")) {
      queue_ = watch->queue = at::zeros({3}, at::kDouble);
      generator_ = watch->generator =
          at::detail::createCPUGenerator(7 + static_cast<uint64_t>(world.rank()));
    }
    if (run.has("loading")) {
      options.loader.transforms.push_back([](data::Batch batch) {
        at_batch();
        return batch;
      });
      options.evaluation.transforms.emplace();
    }
    if (run.is("how", "time")) options.max_time = kTime;
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
    } else if (run.is("loss", "batch")) {
      make_of_batch(world, std::move(options));
    } else {
      options.evaluation.metrics = {std::make_shared<train::Accuracy>()};
      const train::Loss loss = [this](const at::Tensor& output, const at::Tensor& target) {
        return seen(torch::nn::functional::cross_entropy(output, target));
      };
      trainer_ = std::make_unique<Trainer>(world, train_model(), loss, samples(), options);
    }
    if (!run.has("tracked")) return;
    trainer_->track("queue", queue_);
    trainer_->track("generator", generator_);
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
      if (run_.is("best", "loss") && !run_.has("parts"))
        out << fmt::format("best at {}\n", manifest.step);
      out << fmt::format("best {}\n", number_text(manifest.metrics.at(run_["best"])));
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
    if (queue_.defined()) {
      write("queue", queue_);
      write("drawn next", at::rand({2}, generator_));
    }
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
  train::Model train_model() {
    return run_.is("model", "net") ? train::Model(net_) : train::Model(mlp_);
  }
  data::TensorDataset samples() const { return train_samples(run_.number("samples")); }

  // Interrupts, and is not finite where it is to be.
  at::Tensor seen(const at::Tensor& loss) {
    const auto& state = trainer_->state();
    const bool trains = at::GradMode::is_enabled();
    const bool is_to_be = interruption->is_ours && interruption->how == "infinite";
    come_to(trains ? "loss" : "evaluating", state.step);
    if (is_to_be && !interruption->is_ours) return loss * std::numeric_limits<float>::infinity();
    const bool is_it = trains && run_.has("bad") && state.step % 5 == 2;
    const bool is_bad =
        is_it && (run_.is("bad", "all") || (run_.is("bad", "rank0") && state.rank == 0));
    const at::Tensor made = is_bad ? loss * std::numeric_limits<float>::infinity() : loss;
    const bool is_bad_later =
        is_it && run_.is("bad", "gradients") && (has_lanes(run_) || state.rank == 0);
    if (!trains) return made;
    made.register_hook([step = state.step, is_bad_later](const at::Tensor& gradient) {
      come_to("backward", step);
      return is_bad_later ? gradient * std::numeric_limits<float>::infinity() : gradient;
    });
    return made;
  }

  void make_of_batch(World& world, TrainerOptions options) {
    const auto outputs = [model = train_model()](const data::Batch& batch) {
      return model.forward(batch.data);
    };
    const auto loss = [this](const at::Tensor& output, const data::Batch& batch) {
      return seen(torch::nn::functional::cross_entropy(output, batch.target));
    };
    options.evaluation.measure = [outputs, loss](const data::Batch& batch) {
      const at::Tensor output = outputs(batch);
      const at::Tensor right = output.argmax(1) == batch.target;
      return std::map<std::string, double>{
          {"loss", loss(output, batch).item<double>()},
          {"accuracy", right.to(at::kDouble).mean().item<double>()}};
    };
    trainer_ = std::make_unique<Trainer>(
        world, train_model(), train::LossOfBatch([outputs, loss](const data::Batch& batch) {
          return loss(outputs(batch), batch);
        }),
        samples(), options);
  }

  void make_parts(World& world, TrainerOptions options) {
    const auto classes = [](Net& net, const at::Tensor& x) { return call(net, x); };
    const auto loss_of = [classes](Net& net, const data::Batch& batch) {
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
  Net net_{run_}, other_{run_};
  torch::nn::Sequential mlp_{torch::nn::Linear(6, 16), torch::nn::Tanh(), torch::nn::Linear(16, 3)};
  at::Tensor queue_;
  at::Generator generator_;
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
                    .step = start.number("step"),
                    .is_twice = start.has("again")};
  what.is_ours =
      start.has("how") && (start.is("rank", "all") || start.number("rank") == world.rank());
  if (world.is_main()) what.series.open(folder + "/" + kSeries, std::ios::app);
  interruption = &what;
  seed_everything(1, world);
  Training training(all, world, notice, folder);
  watch_files(at_file);
  const auto outcome = training.trainer().run();
  const int64_t calls = watch_files(nullptr);
  if (what.series.is_open())
    what.series << fmt::format("file {} \nloading {} \n", calls, what.batches.load());
  std::ofstream end(folder + "/" + kEnd + std::to_string(world.rank()));
  training.write_end(outcome, end);
  return outcome.exit_status();
}

}  // namespace lockstep::test::runs
