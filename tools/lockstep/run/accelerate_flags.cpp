#include "run/accelerate_flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "flags.h"
#include "lockstep/core/environment.h"

namespace lockstep::tool {
namespace {

// Flags of torchrun that follow from accelerate's, and accelerate's.
constexpr std::array<std::pair<const char*, const char*>, 5> kSameFlags = {{
    {"--nproc-per-node", "--num-processes"},
    {"--nnodes", "--num-machines"},
    {"--node-rank", "--machine-rank"},
    {"--master-addr", "--main-process-ip"},
    {"--master-port", "--main-process-port"},
}};

// An empty CUDA_VISIBLE_DEVICES hides all GPUs; elsewhere an empty variable says nothing.
bool is_set(const std::string& name) {
  if (name == "CUDA_VISIBLE_DEVICES") return std::getenv(name.c_str()) != nullptr;
  return env_text(name.c_str()).has_value();
}

// Flags of `command` that were not given get the values of accelerate's.
void give_flags(CLI::App& command, const std::map<std::string, std::string>& flags,
                const AccelerateFlags::IsGiven& is_given) {
  for (const auto& [torchruns, accelerates] : kSameFlags) {
    if (!is_given(torchruns) || !is_given(accelerates)) continue;
    const std::string one = command.get_option(torchruns)->results().back();
    const auto meant = flags.find(torchruns);
    const std::string other =
        meant != flags.end() ? meant->second : command.get_option(accelerates)->results().back();
    if (one == other) continue;
    throw ConfigError(
        fmt::format("[run] {} and {} say different things about the same, {} and {}: give one of "
                    "them",
                    torchruns, accelerates, one, other));
  }
  for (const auto& [name, value] : flags) {
    CLI::Option* option = command.get_option(name);
    if (option->count() > 0) {
      // torchrun's own flag wins, and so does its variable, but over a flag of the command line.
      const char* accelerates = accelerates_name(name);
      if (is_given(name) || accelerates == nullptr || !is_given(accelerates)) continue;
      option->clear();
    }
    option->add_result(value);
    option->run_callback();
  }
}

}  // namespace

const char* accelerates_name(const std::string& torchruns) {
  for (const auto& [name, accelerates] : kSameFlags) {
    if (torchruns == name) return accelerates;
  }
  return nullptr;
}

void AccelerateFlags::add_to(CLI::App& command) {
  const auto option = [&command](const std::string& name, auto& value, const char* type) {
    return command.add_option(both_spellings(name), value)
        ->envname(variable_of(name))
        ->type_name(type)
        ->group(kHidden);
  };
  command
      .add_option("--config-file,--config_file", file_,
                  "A file of `accelerate config`; its flags are taken, too")
      ->envname(variable_of("--config-file"))
      ->type_name("FILE");
  option("--num-processes", processes_, "N")->check(whole_number(1, 1'000'000));
  option("--num-machines", machines_, "N")->check(whole_number(1, 50'000));
  option("--machine-rank", rank_, "N")->check(whole_number(0, 49'999));
  option("--main-process-ip", ip_, "HOST");
  option("--main-process-port", port_, "PORT")->check(whole_number(0, 65535));
  option("--num-cpu-threads-per-process", threads_, "N")->check(whole_number(1, 100'000));
  option("--mixed-precision", precision_, "NAME")->check(one_of({"no", "fp16", "bf16"}));
  option("--gpu-ids", gpus_, "LIST");
  for (const std::string& key : launch::fsdp_keys()) {
    std::string name = "--fsdp-" + key;
    std::replace(name.begin(), name.end(), '_', '-');
    option(name, settings_of_fsdp_[key], "VALUE");
  }
  const auto flag = [&command](const std::string& name, bool& value) {
    command.add_flag(both_spellings(name), value)->envname(variable_of(name))->group(kHidden);
  };
  flag("--cpu", cpu_);
  flag("--multi-gpu", gpu_);
  flag("--use-fsdp", fsdp_);
  flag("--same-network", accepted_);
  flag("--debug", debug_);
  flag("-q,--quiet", accepted_);  // it is
}

launch::Accelerate AccelerateFlags::settings(const launch::Accelerate& fsdp) const {
  if (cpu_ && gpu_) throw ConfigError("[run] --cpu and --multi-gpu contradict each other");
  launch::Accelerate settings =
      file_.empty() ? launch::Accelerate{} : launch::read_accelerate(file_);
  if (processes_ > 0) settings.num_processes = processes_;
  if (machines_ > 0) settings.num_machines = machines_;
  if (rank_ >= 0) settings.machine_rank = rank_;
  if (port_ >= 0) settings.main_process_port = port_;
  if (!ip_.empty()) settings.main_process_ip = ip_;
  if (!precision_.empty()) settings.mixed_precision = precision_;
  if (!gpus_.empty()) settings.gpu_ids = gpus_;
  if (cpu_) settings.use_cpu = true;
  if (gpu_) settings.distributed_type = "MULTI_GPU";
  if (fsdp_) settings.distributed_type = "FSDP";
  if (debug_) settings.debug = true;
  for (const auto& [key, value] : settings_of_fsdp_) {
    if (value.empty() || settings.distributed_type == "FSDP") continue;
    throw ConfigError(fmt::format(
        "[run] --fsdp_{} without --use_fsdp (or distributed_type: FSDP in the file) says nothing: "
        "give both, or leave it out",
        key));
  }
  for (const auto& [key, value] : fsdp.fsdp) settings.fsdp[key] = value;
  return settings;
}

void AccelerateFlags::apply(CLI::App& command, launch::Options& options,
                            const IsGiven& is_given) const {
  launch::Accelerate fsdp;  // what flags say of it
  for (const auto& [key, value] : settings_of_fsdp_) {
    if (!value.empty()) fsdp.set_fsdp(key, value);
  }
  const bool given = processes_ > 0 || machines_ > 0 || rank_ >= 0 || port_ >= 0 || !ip_.empty() ||
                     !precision_.empty() || !gpus_.empty() || threads_ > 0 || cpu_ || gpu_ ||
                     fsdp_ || debug_ || !fsdp.fsdp.empty();
  if (file_.empty() && !given) return;
  const launch::Accelerate settings = this->settings(fsdp);
  give_flags(command, settings.flags(), is_given);
  auto variables = settings.environment();
  if (threads_ > 0) variables["OMP_NUM_THREADS"] = std::to_string(threads_);
  // accelerate's variable is no also where nothing was said.
  if (precision_ == "no") variables["LOCKSTEP_MIXED_PRECISION"] = precision_;
  // What a flag says goes before the environment, what the file says behind it. They are set here,
  // too: GPUs are counted, and a run's file is checked, with what the ranks will find.
  std::map<std::string, bool> by_flag = {{"ACCELERATE_MIXED_PRECISION", !precision_.empty()},
                                         {"LOCKSTEP_MIXED_PRECISION", !precision_.empty()},
                                         {"ACCELERATE_USE_CPU", cpu_},
                                         {"ACCELERATE_USE_FSDP", fsdp_},
                                         {"ACCELERATE_DEBUG_MODE", debug_},
                                         {"CUDA_VISIBLE_DEVICES", !gpus_.empty()},
                                         {"OMP_NUM_THREADS", threads_ > 0}};
  fsdp.distributed_type = "FSDP";
  for (const auto& [name, value] : fsdp.environment()) {
    if (name.starts_with("FSDP_")) by_flag[name] = true;
  }
  for (const auto& [name, value] : variables) {
    const auto flag = by_flag.find(name);
    if ((flag == by_flag.end() || !flag->second) && is_set(name)) continue;
    setenv(name.c_str(), value.c_str(), 1);
    options.environment[name] = value;
  }
  for (const std::string& remark : settings.remarks) fmt::print(stderr, "lockstep: {}\n", remark);
}

}  // namespace lockstep::tool
