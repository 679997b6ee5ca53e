#include "run/accelerate_flags.h"

#include <fmt/format.h>

#include <cstdio>

#include "flags.h"

namespace lockstep::tool {

void AccelerateFlags::add_to(CLI::App& command) {
  const auto option = [&command](const std::string& name, auto& value, const char* type) {
    return command.add_option(both_spellings(name), value)->type_name(type)->group(kHidden);
  };
  command
      .add_option("--config-file,--config_file", file_,
                  "A file of `accelerate config`; its flags are taken, too")
      ->type_name("FILE");
  option("--num-processes", processes_, "N")->check(whole_number(1, 1'000'000));
  option("--num-machines", machines_, "N")->check(whole_number(1, 50'000));
  option("--machine-rank", rank_, "N")->check(whole_number(0, 49'999));
  option("--main-process-ip", ip_, "HOST");
  option("--main-process-port", port_, "PORT")->check(whole_number(0, 65535));
  option("--num-cpu-threads-per-process", threads_, "N")->check(whole_number(1, 100'000));
  option("--mixed-precision", precision_, "NAME")->check(one_of({"no", "fp16", "bf16", "fp8"}));
  option("--gpu-ids", gpus_, "LIST");
  const auto flag = [&command](const std::string& name, bool& value) {
    command.add_flag(both_spellings(name), value)->group(kHidden);
  };
  flag("--cpu", cpu_);
  flag("--multi-gpu", gpu_);
  flag("--use-fsdp", fsdp_);
  flag("--same-network", same_network_);
}

void AccelerateFlags::apply(CLI::App& command, launch::Options& options) const {
  const bool given = processes_ > 0 || machines_ > 0 || rank_ >= 0 || port_ >= 0 || !ip_.empty() ||
                     !precision_.empty() || !gpus_.empty() || threads_ > 0 || cpu_ || gpu_ || fsdp_;
  if (file_.empty() && !given) return;
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

  for (const auto& [name, value] : settings.flags()) {
    CLI::Option* option = command.get_option(name);
    if (option->count() > 0) continue;  // torchrun's own flag, or its variable, wins
    option->add_result(value);
    option->run_callback();
  }
  options.environment = settings.environment();
  if (threads_ > 0) options.environment["OMP_NUM_THREADS"] = std::to_string(threads_);
  for (const std::string& remark : settings.remarks) fmt::print(stderr, "lockstep: {}\n", remark);
}

}  // namespace lockstep::tool
