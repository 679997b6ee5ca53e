#include "lockstep/train/run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <ostream>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/format/directory/folder_lock.h"
#include "comm/text.h"
#include "core/files/job_file.h"
#include "core/files/whole_file.h"
#include "core/number.h"
#include "lockstep/checkpoint/directory.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/core/preemption.h"
#include "lockstep/parallel/random.h"
#include "lockstep/train/config_texts.h"
#include "lockstep/train/progress.h"
#include "lockstep/train/run_history.h"
#include "lockstep/train/run_report.h"
#include "train/options.h"
#include "train/report/exporters/metrics_server.h"
#include "train/run/language_model.h"
#include "train/run/options_of.h"
#include "train/run/report.h"
#include "train/run/run_noticed.h"
#include "train/run/text.h"
#include "train/training.h"

namespace lockstep::train {
namespace {

constexpr int64_t kOnlyAtTheEnds = int64_t{1} << 60;  // steps between two reports

// What a run writes beside its checkpoints; empty: nothing.
struct Files {
  Files() = default;
  explicit Files(const LoggingConfig& logging)
      : log(logging.output_dir), result(logging.result_file) {
    const std::filesystem::path file = logging.metrics_file;
    if (!file.empty()) {
      if (file.filename() != "metrics.jsonl") {
        throw ConfigError(fmt::format(
            "[run] logging.metrics_file: {}: a run's log is called metrics.jsonl, by which "
            "`lockstep "
            "report` and `lockstep top` know it; give a path that ends with it, or output_dir",
            file.string()));
      }
      log = file.has_parent_path() ? file.parent_path().string() : ".";
    }
    if (logging.output_dir.empty()) return;
    if (result.empty()) result = logging.output_dir + "/result.json";
    config = logging.output_dir + "/config.yaml";
  }
  std::string log;  // the folder
  std::string result, config;
};

using Locks = std::vector<checkpoint::FolderLock>;

// What is in the folder of checkpoints before the run begins, as rank 0 finds it.
enum class Found : char { Nothing, Own, Others };

bool is_one_place(const std::string& one, const std::string& other) {
  std::error_code error;
  return !one.empty() && std::filesystem::equivalent(one, other, error) && !error;
}

// Until this run has a result of its own there is none, not that of a run before; and the
// configuration is this run's. A file that the run was read from stays, with its comments. For
// rank 0.
void replace_files(const Files& files, const RunConfig& config, const Registry& registry) {
  if (!files.result.empty()) remove_whole_file(files.result);
  if (files.config.empty() || is_one_place(config.file, files.config)) return;
  write_whole(files.config, show_config(config, registry.extensions()));
}

// Where a run is resumed and how it is started, but not the number of its ranks: that a host has to
// say on its command line.
bool says_only_how(const std::string& key) {
  return key == "checkpoint.resume" ||
         (key.starts_with("launch.") && key != "launch.nproc_per_node" && key != "launch.nnodes");
}

// Where it stays it has to say what the run does.
void refuse_other_config(const Files& files, const RunConfig& config, const Registry& registry) {
  if (files.config.empty() || !is_one_place(config.file, files.config)) return;
  std::map<std::string, std::string> alone;
  try {
    alone =
        config_texts(load_config(config.file, {}, registry.extensions()), registry.extensions());
  } catch (const ConfigError&) {
    // Only what was set makes it correct.
  }
  std::vector<std::string> others;
  for (const auto& [key, value] : config_texts(config, registry.extensions())) {
    if (!says_only_how(key) && (!alone.contains(key) || alone.at(key) != value)) {
      others.push_back(key);
    }
  }
  if (others.empty()) return;
  throw ConfigError(fmt::format(
      "{} is the file of this run, and the run's config.yaml, which is not the same, as "
      "{} was set: give the file another name, or this run another logging.output_dir",
      files.config, fmt::join(others, ", ")));
}

// The run would replace what it began with.
void refuse_pretrained_place(const RunConfig& config) {
  const auto& [model, logging] = std::tie(config.model, config.logging);
  if (model.kind != "transformer" || logging.output_dir.empty()) return;
  const std::string place = logging.output_dir + "/model";
  if (!is_one_place(model.transformer.pretrained, place)) return;
  throw ConfigError(
      fmt::format("model.pretrained is {}, where this run writes its own model at the end: give "
                  "another logging.output_dir",
                  place));
}

// Found out now, and not when the run has been trained.
void probe_result(const std::string& path) {
  if (path.empty() || is_stream(path)) return;
  std::error_code none;
  if (std::filesystem::is_directory(path, none)) {
    throw ConfigError(fmt::format("logging.result_file: {} is a folder; name a file", path));
  }
  const auto there = std::filesystem::canonical(path, none);
  const std::string probe = (none ? path : there.string()) + ".probe";
  const int error = write_whole_file(probe, "");
  if (error != 0) {
    throw Error(fmt::format("{} cannot be written: {}", path, std::strerror(error)));
  }
  std::filesystem::remove(probe, none);
}

// Rank 0 makes folders and refuses those in which another run is at work; what it meets all ranks
// throw. Returns its locks.
Locks prepare(const Files& files, const RunConfig& config, const Registry& registry, Found found,
              const comm::World& world) {
  std::string fault;  // behind a letter: c, where the configuration has it
  Locks locks;
  if (world.is_main()) {
    try {
      for (const auto& file : {files.log + "/", files.result, files.config}) {
        const auto folder = std::filesystem::path(file).parent_path();
        if (folder.empty() || folder == "/") continue;
        std::error_code error;
        std::filesystem::create_directories(folder, error);
        if (error) {
          throw Error(
              fmt::format("the folder {} cannot be made: {}", folder.string(), error.message()));
        }
      }
      for (const std::string& folder : std::set<std::string>{
               files.log, files.config.empty() ? "" : config.logging.output_dir}) {
        if (folder.empty()) continue;
        locks.emplace_back(folder, ".run.lock", folder,
                           "writes the files of a run here: give this run another "
                           "logging.output_dir, or end that one");
      }
      refuse_other_config(files, config, registry);
      refuse_pretrained_place(config);
      probe_result(files.result);
      // An address that cannot be had leaves an earlier run's files.
      const std::string& address = config.logging.prometheus_address;
      if (!address.empty()) const MetricsServer probe(address);
      // Those of a run that is to be resumed stay until it is.
      if (found == Found::Nothing) replace_files(files, config, registry);
    } catch (...) {
      fault = comm::told_text();
    }
  }
  fault = world.group().broadcast_bytes(fault, 0, {.label = "run: folders"});
  if (fault.empty()) return locks;
  comm::throw_told(fault, "[run] ");
}

// The page of the run's folder, on rank 0, once its log is whole. The run can do without.
void write_page(const RunConfig& config, const Files& files, const comm::World& world) {
  if (!world.is_main() || config.logging.output_dir.empty()) return;
  try {
    std::error_code none;
    const bool is_traced = std::filesystem::exists(files.log + "/trace.json", none) &&
                           is_one_place(files.log, config.logging.output_dir);
    write_whole(config.logging.output_dir + "/report.html",
                report_page({read_run(files.log)}, {.trace = is_traced ? "trace.json" : ""}));
  } catch (const std::exception& error) {
    log::warn(error.what());
  }
}

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

int train(const RunConfig& config, const Registry& registry, const comm::World& world,
          const PreemptionNotice* notice) {
  Files files(config.logging);
  const std::string directory = checkpoint_directory(config);
  const Found found = found_in(directory, world);
  // It will be refused, and the folder is another run's.
  const std::string& resume = config.checkpoint.resume;
  if (found == Found::Others && resume != "latest" && !is_checkpoint_of(resume, directory)) {
    files = {};
  }
  const Locks locks = prepare(files, config, registry, found, world);
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
  const LoggingConfig& logging = config.logging;
  const int64_t every = logging.logging_steps;
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
  const bool is_logged = !files.log.empty() || !logging.open_metrics_file.empty() ||
                         !logging.prometheus_address.empty();
  std::shared_ptr<Monitoring> log;
  // Of several ranks the line names the slowest, and warnings are printed, without a log, too.
  if (is_logged || (every > 0 && world.size() > 1)) {
    MonitorOptions monitored{.directory = files.log,
                             .every_steps = every > 0 ? every : kOnlyAtTheEnds,
                             .name = config.model.kind,
                             .config = config_texts(config, registry.extensions()),
                             .display = display,
                             .tensorboard = logging.tensorboard,
                             .open_metrics_file = logging.open_metrics_file,
                             .prometheus_address = logging.prometheus_address};
    if (!logging.trace_steps.empty()) {
      monitored.trace_steps = {logging.trace_steps[0], logging.trace_steps[1]};
    }
    // Parameters that an Fsdp shards cannot be looked at between steps.
    if (!options.fsdp) monitored.module = model.module();
    log = std::make_shared<Monitoring>(world, std::move(monitored));
    options.callbacks.push_back(log);
  }
  // After the log, whose report it shows.
  options.callbacks.push_back(
      std::make_shared<Progress>(display, ProgressOptions{.every_steps = every}));
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
  // In the handler of an exception, with which run_program() ends so.
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
      std::optional<parallel::WeightAverage::Applied> averaged;
      if (auto* average = trainer.average()) averaged.emplace(average->apply());
      const WholeParameters whole(trainer.fsdp());
      if (world.is_main()) {
        save_language_model(language, data, config.logging.output_dir + "/model");
      }
      world.group().barrier().wait();
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
