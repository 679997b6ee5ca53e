// This host, and machines in files.
#include "lockstep/plan/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "core/files/read_file.h"
#include "core/process/cores.h"
#include "core/process/processor.h"
#include "lockstep/core/error.h"
#include "plan/sizes.h"

namespace lockstep::plan {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "lockstep.machine";

// "MemTotal:  24105092 kB", or what the control group leaves of it.
double host_memory() {
  double bytes = 0;
  std::ifstream info("/proc/meminfo");
  for (std::string word; info >> word;) {
    if (word != "MemTotal:") continue;
    info >> bytes;
    bytes *= 1024;
    break;
  }
  std::ifstream limit("/sys/fs/cgroup/memory.max");
  if (double most = 0; limit >> most && most > 0) bytes = std::min(bytes, most);
  return bytes;
}

// `estimate` where the file does not say it, like those of earlier versions.
double at_least_zero(const Json& json, const char* key, const std::string& path, double estimate) {
  const auto found = json.find(key);
  if (found == json.end()) return estimate;
  const double value = found->is_number() ? found->get<double>() : -1;
  if (!(value >= 0) || !std::isfinite(value)) {
    throw ConfigError(
        fmt::format("[plan] {}: {} is not a number of at least 0: run "
                    "`lockstep bench --to {}` again",
                    path, key, path));
  }
  return value;
}

// A number above 0, or the file is refused.
double positive(const Json& json, const char* key, const std::string& path) {
  const auto found = json.find(key);
  const double value = found != json.end() && found->is_number() ? found->get<double>() : 0;
  if (!(value > 0) || !std::isfinite(value)) {
    throw ConfigError(
        fmt::format("[plan] {}: {} is not a number above 0: run "
                    "`lockstep bench --to {}` again",
                    path, key, path));
  }
  return value;
}

// Of one node.
int64_t ranks_of(const Json& json, const std::string& path) {
  const auto found = json.find("ranks");
  const double value = found != json.end() && found->is_number() ? found->get<double>() : 0;
  if (value >= 1 && value <= kMostRanks && value == std::floor(value)) {
    return static_cast<int64_t>(value);
  }
  throw ConfigError(fmt::format(
      "[plan] {}: ranks is not a whole number of 1 to {}: run `lockstep bench --to {}` again", path,
      kMostRanks, path));
}

// `otherwise` where the file does not say it.
bool flag_of(const Json& json, const char* key, const std::string& path, bool otherwise) {
  const auto found = json.find(key);
  if (found == json.end()) return otherwise;
  if (found->is_boolean()) return found->get<bool>();
  throw ConfigError(
      fmt::format("[plan] {}: {} is neither true nor false: run `lockstep bench --to {}` again",
                  path, key, path));
}

std::vector<MeasuredCollective> collectives(const Json& json, const char* key,
                                            const std::string& path) {
  const Json points = json.value(key, Json::array());
  std::vector<MeasuredCollective> out;
  for (const Json& point : points.is_array() ? points : Json::array({points})) {
    if (!point.is_object()) {
      throw ConfigError(
          fmt::format("[plan] {}: {} is not a list of objects with bytes and seconds", path, key));
    }
    const MeasuredCollective one = {positive(point, "bytes", path),
                                    positive(point, "seconds", path)};
    if (!out.empty() && one.bytes <= out.back().bytes) {
      throw ConfigError(fmt::format("[plan] {}: {} is not in ascending order of bytes", path, key));
    }
    out.push_back(one);
  }
  return out;
}

Json points_of(const std::vector<MeasuredCollective>& all) {
  Json out = Json::array();
  for (const auto& [bytes, seconds] : all) out.push_back({{"bytes", bytes}, {"seconds", seconds}});
  return out;
}

}  // namespace

Machine this_host() {
  const auto cores = static_cast<int64_t>(std::max<size_t>(1, allowed_cores().size()));
  // A core of today's servers: two vector units of 8 floats, about 2.5 GHz.
  return {.device = {.name = "cpu",
                     .memory_bytes = host_memory(),
                     .memory_bandwidth = 10e9,
                     .narrow_flops = 80e9,
                     .float_flops = 80e9,
                     .local_bandwidth = 5e9,
                     .efficiency = 0.5,
                     .reserved_bytes = 145e6,  // measured, as both that follow
                     .convolution_bytes = 11e6,
                     .attention_bytes = 9e6,
                     .allocator_margin = 0.01,
                     .shares_memory = true,
                     .has_bf16 = !native_bf16_cpu().empty(),
                     .source = "estimated for a core; `lockstep bench` measures"},
          .network = network_named("ethernet-10g"),
          .devices_per_node = cores,
          // Two ranks in shared memory, docs/benchmarks.md.
          .all_reduce = {{65536, 2e-6}, {26214400, 1.57e-3}}};
}

Machine read_machine(const std::string& path) {
  const std::string text =
      read_file(path, "[plan] " + path, fmt::format("`lockstep bench --to {}` writes it", path));
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object() || json.value("format", Json()) != kFormat) {
    throw ConfigError(
        fmt::format("[plan] {}: is not a file of `lockstep bench` (format \"{}\")", path, kFormat));
  }
  Machine machine = this_host();
  machine.is_measured = true;
  machine.all_reduce.clear();
  Device& device = machine.device;
  const Json name = json.value("device", Json());
  device.name = name.is_string() ? name.get<std::string>() : "measured";
  device.source = path;
  device.memory_bytes = positive(json, "memory_bytes", path);
  device.memory_bandwidth = positive(json, "memory_bandwidth", path);
  device.float_flops = positive(json, "float_flops", path);
  device.narrow_flops = positive(json, "narrow_flops", path);
  device.reserved_bytes = positive(json, "reserved_bytes", path);
  device.convolution_bytes =
      at_least_zero(json, "convolution_bytes", path, device.convolution_bytes);
  device.attention_bytes = at_least_zero(json, "attention_bytes", path, device.attention_bytes);
  device.local_bandwidth = positive(json, "local_bandwidth", path);
  machine.devices_per_node = ranks_of(json, path);
  device.shares_memory = flag_of(json, "shares_memory", path, false);
  device.has_bf16 = flag_of(json, "has_bf16", path, device.has_bf16);
  machine.all_reduce = collectives(json, "all_reduce", path);
  machine.all_gather = collectives(json, "all_gather", path);
  machine.reduce_scatter = collectives(json, "reduce_scatter", path);
  return machine;
}

std::string machine_json(const Machine& machine) {
  const Device& device = machine.device;
  const Json json = {{"format", kFormat},
                     {"device", device.name},
                     {"ranks", machine.devices_per_node},
                     {"memory_bytes", device.memory_bytes},
                     {"memory_bandwidth", device.memory_bandwidth},
                     {"float_flops", device.float_flops},
                     {"narrow_flops", device.narrow_flops},
                     {"reserved_bytes", device.reserved_bytes},
                     {"convolution_bytes", device.convolution_bytes},
                     {"attention_bytes", device.attention_bytes},
                     {"local_bandwidth", device.local_bandwidth},
                     {"shares_memory", device.shares_memory},
                     {"has_bf16", device.has_bf16},
                     {"all_reduce", points_of(machine.all_reduce)},
                     {"all_gather", points_of(machine.all_gather)},
                     {"reduce_scatter", points_of(machine.reduce_scatter)}};
  return json.dump(2) + "\n";
}

}  // namespace lockstep::plan
