#include "train/run/run_files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>
#include <tuple>

#include "comm/text.h"
#include "core/files/whole_file.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/train/config_texts.h"
#include "lockstep/train/run_history.h"
#include "lockstep/train/run_report.h"
#include "train/report/exporters/metrics_server.h"
#include "train/run/report.h"

namespace lockstep::train {
namespace {

bool is_one_place(const std::string& one, const std::string& other) {
  std::error_code error;
  return !one.empty() && std::filesystem::equivalent(one, other, error) && !error;
}

// Where a run is resumed and how it is started, but not the number of its ranks: that a host has to
// say on its command line.
bool says_only_how(const std::string& key) {
  return key == "checkpoint.resume" ||
         (key.starts_with("launch.") && key != "launch.nproc_per_node" && key != "launch.nnodes");
}

// A file that stays has to describe this run.
void refuse_other_config(const RunFiles& files, const RunConfig& config, const Registry& registry) {
  if (files.config.empty() || !is_one_place(config.file, files.config)) return;
  std::map<std::string, std::string> alone;
  try {
    alone =
        config_texts(load_config(config.file, {}, registry.extensions()), registry.extensions());
  } catch (const ConfigError&) {
    // It is correct only together with what was set.
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

}  // namespace

RunFiles::RunFiles(const LoggingConfig& logging)
    : log(logging.output_dir), result(logging.result_file) {
  const std::filesystem::path file = logging.metrics_file;
  if (!file.empty()) {
    if (file.filename() != "metrics.jsonl") {
      throw ConfigError(fmt::format(
          "[run] logging.metrics_file: {}: a run's log is called metrics.jsonl, by which "
          "`lockstep report` and `lockstep top` know it; give a path that ends with it, or "
          "output_dir",
          file.string()));
    }
    log = file.has_parent_path() ? file.parent_path().string() : ".";
  }
  if (logging.output_dir.empty()) return;
  if (result.empty()) result = logging.output_dir + "/result.json";
  config = logging.output_dir + "/config.yaml";
}

RunLocks prepare_files(const RunFiles& files, const RunConfig& config, const Registry& registry,
                       Found found, const comm::World& world) {
  std::string fault;  // behind a letter: c, where the configuration has it
  RunLocks locks;
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

void replace_files(const RunFiles& files, const RunConfig& config, const Registry& registry) {
  if (!files.result.empty()) remove_whole_file(files.result);
  if (files.config.empty() || is_one_place(config.file, files.config)) return;
  write_whole(files.config, show_config(config, registry.extensions()));
}

void write_page(const RunConfig& config, const RunFiles& files, const comm::World& world) {
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

}  // namespace lockstep::train
