#include "lockstep/train/run.h"

#include <fmt/format.h>
#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <ostream>
#include <utility>
#include <vector>

#include "comm/text.h"
#include "core/files/job_file.h"
#include "core/number.h"
#include "lockstep/checkpoint/directory.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/core/preemption.h"
#include "lockstep/parallel/random.h"
#include "lockstep/train/config_texts.h"
#include "lockstep/train/progress.h"
#include "train/options.h"
#include "train/report/text.h"
#include "train/run/language_model.h"
#include "train/run/options_of.h"
#include "train/run/report.h"
#include "train/run/run_files.h"
#include "train/run/run_noticed.h"
#include "train/training.h"

namespace lockstep::train {
namespace {

constexpr int64_t kOnlyAtTheEnds = int64_t{1} << 60;  // steps between two reports

// Resident memory of all ranks.
std::vector<double> peaks_of(const comm::World& world) {
  std::vector<double> all;
  const auto mine = fmt::format("{}", peak_memory());
  for (const auto& text : world.group().all_gather_bytes(mine, {.label = "run: memory"})) {
    all.push_back(number_from(text).value());
  }
  return all;
}

// What is done once the run knows where it begins: the lines at the start.
class Beginning : public Callback {
 public:
  using Lines = std::function<std::vector<std::string>(const RunState&)>;
  Beginning(std::ostream& out, Lines lines) : out_(out), lines_(std::move(lines)) {}
  void on_train_begin(const RunState& state) override {
    for (const auto& line : lines_(state)) out_ << line << "\n";
    out_.flush();
  }

 private:
  std::ostream& out_;
  Lines lines_;
};

// "resuming from step 500 of 1,000 (runs/a/checkpoints/step-00000500)"
std::string resumption(const RunState& state, const Saving& saving) {
  std::string from = saving.resume_from;
  // A job that has been started again has left the checkpoint that it began with.
  if (!is_checkpoint_of(from, saving.directory)) {
    from = checkpoint::newest_checkpoint(saving.directory).value_or(from);
  }
  return fmt::format("resuming from step {}{} ({})", with_commas(state.step),
                     state.steps > 0 ? " of " + with_commas(state.steps) : "", from);
}

Found found_in(const std::string& directory, const comm::World& world) {
  std::string found(1, static_cast<char>(Found::Nothing));
  if (world.is_main() && !directory.empty()) {
    try {
      if (checkpoint::newest_checkpoint(directory)) {
        found[0] = static_cast<char>(is_restarted_job(directory) ? Found::Own : Found::Others);
      }
    } catch (const Error&) {
      // Restoring says what is wrong with it.
    }
  }
  return static_cast<Found>(world.group().broadcast_bytes(found, 0, {.label = "run: place"})[0]);
}

// Of several ranks the progress line names the slowest, and warnings are printed, without a log,
// too.
bool is_monitored(const RunConfig& config, const RunFiles& files, const comm::World& world) {
  const LoggingConfig& logging = config.logging;
  return !files.log.empty() || !logging.open_metrics_file.empty() ||
         !logging.prometheus_address.empty() || (logging.logging_steps > 0 && world.size() > 1);
}

MonitorOptions monitor_options(const RunConfig& config, const Registry& registry,
                               const RunFiles& files) {
  const LoggingConfig& logging = config.logging;
  MonitorOptions options{
      .directory = files.log,
      .every_steps = logging.logging_steps > 0 ? logging.logging_steps : kOnlyAtTheEnds,
      .name = config.model.kind,
      .config = config_texts(config, registry.extensions()),
      .tensorboard = logging.tensorboard,
      .open_metrics_file = logging.open_metrics_file,
      .prometheus_address = logging.prometheus_address};
  if (!logging.trace_steps.empty()) {
    options.trace_steps = {logging.trace_steps[0], logging.trace_steps[1]};
  }
  return options;
}

// The model as it is evaluated. Every rank calls it; rank 0 writes.
void save_trained(const models::Transformer& language, const RunData& data, Trainer& trainer,
                  const comm::World& world, const std::string& folder) {
  std::optional<parallel::WeightAverage::Applied> averaged;
  if (auto* average = trainer.average()) averaged.emplace(average->apply());
  const WholeParameters whole(trainer.fsdp());
  if (world.is_main()) save_language_model(language, data, folder);
  world.group().barrier().wait();
}

int train(const RunConfig& config, const Registry& registry, const comm::World& world,
          const PreemptionNotice* notice) {
  RunFiles files(config.logging);
  const std::string directory = checkpoint_directory(config);
  const Found found = found_in(directory, world);
  // It will be refused, and the folder is another run's.
  const std::string& resume = config.checkpoint.resume;
  if (found == Found::Others && resume != "latest" && !is_checkpoint_of(resume, directory)) {
    files = {};
  }
  const RunLocks locks = prepare_files(files, config, registry, found, world);
  parallel::seed_everything(static_cast<uint64_t>(config.training.seed), world);
  const RunData data = data_of(config, registry, world);
  const SampleShape shape = shape_of(data);
  const Model model = registry.model(config, shape);
  const models::Transformer language = language_model(config, model);
  // A program may have another loss, of a transformer's logits.
  if (!language.is_empty()) refuse_foreign_tokens(config, data, language);
  const bool has_own_loss = !language.is_empty() && is_next_token(config.training.loss);
  TrainerOptions options = options_of(config, registry, data, world);
  options.fsdp = fsdp_of(config, model.module(), world);
  if (has_own_loss) measure_language(options, config, language);
  options.notice = notice;
  if (found == Found::Own) {
    options.saving.resume = Resume::Latest;
    options.saving.resume_from.clear();
  }
  std::ostream& out = world.main_out();
  const auto display = std::make_shared<ProgressDisplay>(out);
  Trainer* made = nullptr;
  bool has_begun = found == Found::Nothing;
  options.callbacks = {std::make_shared<Beginning>(out, [&](const RunState& state) {
    if (!std::exchange(has_begun, true) && world.is_main()) replace_files(files, config, registry);
    auto lines = header(config, data, options, *made, model.module(), world);
    if (state.resumed_at >= 0 && world.is_main()) {
      lines.push_back(resumption(state, options.saving));
    }
    return lines;
  })};
  std::shared_ptr<Monitoring> log;
  if (is_monitored(config, files, world)) {
    MonitorOptions monitored = monitor_options(config, registry, files);
    monitored.display = display;
    // Parameters that an Fsdp shards cannot be looked at between steps.
    if (!options.fsdp) monitored.module = model.module();
    log = std::make_shared<Monitoring>(world, std::move(monitored));
    options.callbacks.push_back(log);
  }
  // After the log, whose report it shows.
  options.callbacks.push_back(std::make_shared<Progress>(
      display, ProgressOptions{.every_steps = config.logging.logging_steps}));
  std::shared_ptr<Samples> samples;
  if (!config.training.sample.prompt.empty()) {
    samples = std::make_shared<Samples>(config, data, language, display, log);
    options.callbacks.push_back(samples);
  }
  const auto make = [&] {
    if (has_own_loss) {
      return Trainer(world, model, next_token_loss(language), data.training, options);
    }
    return Trainer(world, model, registry.loss(config, shape), data.training, options);
  };
  Trainer trainer = make();
  const auto recomputed = recomputed_blocks(config, language);
  const auto recomputed_too = recomputed_units(config, trainer, model.module());
  if (samples) samples->attach(trainer.fsdp());
  if (data.scaler) trainer.track("scaling", *data.scaler);
  made = &trainer;
  // To be called in an exception's handler; run_program() ends with this status.
  const auto note_failure = [&](int status) {
    if (!world.is_main() || files.result.empty() || !has_begun) return;
    const std::string text = comm::thrown_text();
    try {
      write_whole(files.result, result_json(text, status, trainer.state(), world));
      write_page(config, files, world);
    } catch (const std::exception& another) {
      log::error(another.what());
    }
  };
  try {
    Ending ending{.outcome = trainer.run()};
    const bool is_over = ending.outcome.ended != Ended::Preempted;
    if (!language.is_empty() && is_over && !config.logging.output_dir.empty()) {
      save_trained(language, data, trainer, world, config.logging.output_dir + "/model");
    }
    ending.peak_bytes = peaks_of(world);
    for (const auto& line : summary(ending, config)) out << line << "\n";
    out.flush();
    if (world.is_main() && !files.result.empty()) {
      write_whole(files.result, result_json(ending, config, world));
    }
    write_page(config, files, world);
    return ending.outcome.exit_status();
  } catch (const ConfigError&) {
    note_failure(2);
    throw;
  } catch (...) {
    note_failure(1);
    throw;
  }
}

}  // namespace

int run(const RunConfig& config, const Registry& registry,
        std::optional<PreemptionNotice>& notice) {
  // From the start on: a signal that comes while ranks meet must not end them.
  const bool saves = config.checkpoint.save_on_preemption && !checkpoint_directory(config).empty();
  if (saves) notice.emplace();
  const auto world = comm::World::from_env(world_options_of(config));
  return train(config, registry, world, saves ? &*notice : nullptr);
}

int run(const RunConfig& config, const Registry& registry) {
  std::optional<PreemptionNotice> notice;
  return run(config, registry, notice);
}

}  // namespace lockstep::train
