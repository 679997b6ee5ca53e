// The settings of `accelerate launch`: its configuration file, and the flags that override it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::launch {

struct Accelerate {
  std::optional<int> num_processes, num_machines, machine_rank;  // processes: over all machines
  std::optional<int> main_process_port;
  std::string distributed_type, mixed_precision, main_process_ip, rdzv_backend, gpu_ids;
  bool use_cpu = false, debug = false;
  // Below fsdp_config, without the prefix fsdp_: "sharding_strategy" -> "FULL_SHARD".
  std::map<std::string, std::string> fsdp;
  // What the file says that has no meaning here, one line each, to be said once.
  std::vector<std::string> remarks;

  // A setting of fsdp_config, as the flag --fsdp_KEY gives it. Throws ConfigError that names the
  // flag.
  void set_fsdp(const std::string& key, const std::string& value);

  // The flags of `lockstep run` that start the same job: "--nproc-per-node" -> "2". Throws
  // ConfigError for settings that contradict each other.
  std::map<std::string, std::string> flags() const;
  // What `accelerate launch` would give its workers beside torchrun's variables.
  std::map<std::string, std::string> environment() const;
};

// The keys of fsdp_config, without the prefix fsdp_: as set_fsdp() takes them.
std::vector<std::string> fsdp_keys();

// Reads a file in YAML or JSON, as `accelerate config` writes it. Keys that accelerate does not
// have, at any depth, values of a wrong type, and settings that cannot be honoured (DeepSpeed,
// TPUs, ...) throw ConfigError with the file, the line, and the nearest key or the values that
// there are.
Accelerate read_accelerate(const std::string& path);
// The same from memory; `name` stands for the file in errors.
Accelerate parse_accelerate(const std::string& text, const std::string& name);

}  // namespace lockstep::launch
