#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "core/counted.h"
#include "flags.h"
#include "lockstep/core/error.h"
#include "planning/plan.h"

namespace lockstep::tool {
namespace {

// The number that a file gives for `key`, of MIN:MAX the least; none where it gives none.
std::optional<int64_t> number_in(const train::RunConfig& config, const char* key,
                                 const std::string& text) {
  int64_t number = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, number);
  const bool is_number = error == std::errc() && (end == last || *end == ':');
  return is_number && config.origins.contains(key) ? std::optional(number) : std::nullopt;
}

std::optional<int64_t> ranks_of_host(const train::RunConfig& config) {
  return number_in(config, "launch.nproc_per_node", config.launch.nproc_per_node);
}

// "784" or "3x32x32".
std::vector<int64_t> sizes_of(const std::string& text) {
  std::vector<int64_t> sizes;
  const char* at = text.data();
  const char* const end = at + text.size();
  double elements = 1;
  while (true) {
    int64_t size = 0;
    const auto [next, error] = std::from_chars(at, end, size);
    if (error != std::errc() || size < 1 || (next != end && *next != 'x')) {
      throw ConfigError(
          fmt::format("[plan] --sample {}: numbers above 0 with x between, such as 3x32x32", text));
    }
    elements *= static_cast<double>(size);
    if (elements > kMostOfAFlag) {
      throw ConfigError(
          fmt::format("[plan] --sample {}: at most {} numbers in all", text, kMostOfAFlag));
    }
    sizes.push_back(size);
    if (next == end) return sizes;
    at = next + 1;
  }
}

}  // namespace

void PlanQuestion::add_flags(CLI::App& command) {
  const auto count = [&command](const char* flag, int64_t& value, const char* text) {
    command.add_option(flag, value, text)->type_name("N")->check(whole_number(1, kMostOfAFlag));
  };
  command.add_option("CONFIG", file_, "The file of a run, as lockstep train takes it");
  command.add_option("--set", overrides_, "Replaces a value of the file; any number of times")
      ->type_name("KEY=VALUE")
      ->expected(1)
      ->take_all();
  command
      .add_option("--model", model_,
                  "A published model in the place of a file: qwen3-0.6b to qwen3-32b")
      ->type_name("NAME");
  command.add_option("--device", device_, "The device, by name: h100-sxm (this host's cores)")
      ->type_name("NAME");
  count("--devices-per-node", per_node_,
        "Devices of a node (launch.nproc_per_node; 8; cores of this host)");
  command
      .add_option("--network", network_, "Between nodes, by name (8x400g; this host: ethernet-10g)")
      ->type_name("NAME");
  command.add_option("--machine", machine_, "This machine's measured figures (docs/plan.md)")
      ->type_name("FILE");
  count("--ranks", ranks_, "Ranks (those of one node, or launch.nproc_per_node x nnodes)");
  count("--batch", batch_,
        "Samples of a rank and micro-batch (training.batch_size; with --model 1)");
  count("--tokens", tokens_, "Tokens of a sample, with --model (2048)");
  command
      .add_option("--sample", sample_, "Size of a sample, where data do not say it: 784, 3x32x32")
      ->type_name("SIZES");
  count("--outputs", outputs_, "Classes or target columns, where data do not say it");
  command
      .add_option("--measured-step", measured_step_, "Seconds of a step on one rank, as measured")
      ->type_name("SECONDS")
      ->check(some_seconds(kMostOfAFlag));
  command.add_flag("--recompute", recompute_, "Activations of blocks are recomputed");
  command.add_flag("--bf16", narrow_,
                   "Compute in 16 bits (bfloat16; float16 on devices without it)");
}

plan::Machine PlanQuestion::machine(const train::RunConfig& config) const {
  if (!machine_.empty() && !device_.empty()) {
    throw ConfigError("[plan] --machine and --device: give one of them");
  }
  plan::Machine machine = machine_.empty() ? plan::this_host() : plan::read_machine(machine_);
  const int64_t measured = machine.devices_per_node;
  if (!device_.empty()) {
    machine = {.device = plan::device_named(device_), .network = plan::network_named("8x400g")};
  }
  if (!network_.empty()) machine.network = plan::network_named(network_);
  const auto of_host = ranks_of_host(config);
  if (per_node_ > 0) {
    machine.devices_per_node = per_node_;
  } else if (of_host && ranks_ == 0) {
    // More ranks than cores share them.
    const bool is_estimated = machine.device.shares_memory && !machine.is_measured;
    const double share =
        is_estimated ? static_cast<double>(machine.devices_per_node) / static_cast<double>(*of_host)
                     : 1;
    for (double* const rate : {&machine.device.float_flops, &machine.device.narrow_flops,
                               &machine.device.memory_bandwidth}) {
      *rate *= std::min(share, 1.0);
    }
    machine.devices_per_node = *of_host;
  }
  if (const int64_t together = std::min(ranks(config, machine), machine.devices_per_node);
      !machine_.empty() && together != measured) {
    fmt::print(stderr,
               "lockstep: {0} was measured with {1}, which share a host's cores, memory and "
               "transport; here it is {2} on a host, whose figures are others: lockstep bench "
               "--nproc-per-node {3} measures them\n",
               machine_, counted(measured, "rank"), counted(together, "rank"), together);
  }
  return machine;
}

train::RunConfig PlanQuestion::config() const {
  if (!model_.empty() && !file_.empty()) {
    throw ConfigError("[plan] a file and --model: give one of them");
  }
  if (!file_.empty()) return train::load_config(file_, overrides_);
  if (model_.empty()) {
    throw ConfigError(
        "[plan] say what to plan: a file (lockstep config init writes one), or --model "
        "qwen3-4b (lockstep plan --help)");
  }
  if (!overrides_.empty())
    throw ConfigError("[plan] --set replaces values of a file, and none is given");
  train::RunConfig config;
  config.model.kind = "transformer";
  config.model.transformer = plan::model_named(model_);
  config.data.kind = "tokens";
  config.data.tokens.sequence_length = 2048;
  config.training.batch_size = 1;
  return config;
}

plan::ModelProfile PlanQuestion::profile(const train::RunConfig& given) const {
  train::RunConfig config = given;
  if (narrow_) config.mixed_precision.dtype = "bf16";
  const bool has_sample = !sample_.empty();
  if (!model_.empty() && (has_sample || outputs_ > 0)) {
    throw ConfigError(fmt::format("[plan] --model does not read {}: give --tokens",
                                  has_sample ? "--sample" : "--outputs"));
  }
  if (tokens_ > 0 && (has_sample || config.model.kind != "transformer")) {
    throw ConfigError(fmt::format(
        "[plan] --tokens {}: {}", tokens_,
        has_sample ? "--sample gives the size of a sample, too: leave one out"
                   : "model.kind " + config.model.kind + " takes no texts: give --sample"));
  }
  if (tokens_ > 0) config.data.tokens.sequence_length = tokens_;
  plan::SampleSizes sample;
  if (has_sample) {
    sample.data = sizes_of(sample_);
  } else {
    sample = plan::sample_sizes(config);
  }
  if (outputs_ > 0) sample.outputs = outputs_;
  return plan::profile_of(config, sample);
}

plan::Training PlanQuestion::training(const train::RunConfig& given) const {
  train::RunConfig config = given;
  if (batch_ > 0) config.training.batch_size = batch_;
  plan::Training training = plan::training_of(config);
  if (recompute_) training.recomputed = plan::Recomputed::Blocks;
  if (narrow_) training.precision = plan::Precision::Narrow;
  training.measured_step = measured_step_;
  return training;
}

int64_t PlanQuestion::ranks(const train::RunConfig& config, const plan::Machine& machine) const {
  if (ranks_ > 0) return ranks_;
  // A run has a lane for each rank.
  const int64_t lanes = config.parallel.lanes;
  const int64_t devices =
      lanes > 0 ? std::min(lanes, machine.devices_per_node) : machine.devices_per_node;
  return ranks_of_host(config).value_or(devices) *
         number_in(config, "launch.nnodes", config.launch.nnodes).value_or(1);
}

}  // namespace lockstep::tool
