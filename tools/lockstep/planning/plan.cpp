#include "planning/plan.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/nearest.h"
#include "flags.h"
#include "lockstep/core/error.h"
#include "lockstep/plan/grpo_memory.h"
#include "lockstep/train/progress_line.h"

namespace lockstep::tool {
namespace {

constexpr const char* kPlanFooter =
    R"(Says which of Ddp and Fsdp to use for a model on a machine, and why: memory of a rank by what it is for, the time of a
step, what fits, what is fastest, and where more ranks stop to help. docs/plan.md has formulas and sources.

  lockstep plan run.yaml                                     on this host
  lockstep plan run.yaml --device a100-80gb --ranks 16 --network 8x200g
  lockstep plan --model qwen3-4b --bf16 --device h100-sxm
  lockstep plan --model qwen3-4b --grpo --device h100-sxm    memory of GRPO on 1 to 8 devices
  lockstep plan --devices                                    what is known

Exit status: 0; 2 for wrong arguments; 3 when nothing fits.
)";

int columns() {
  const int width = train::TextStyle::of_file(STDOUT_FILENO).width;
  return width == 0 ? 0 : std::max(40, width);
}

void list_known() {
  fmt::print("{:<16} {:>8} {:>9} {:>14} {:>14} {:>12}  source\n", "device", "memory", "GB/s",
             "16-bit TFLOP/s", "float TFLOP/s", "bus GB/s");
  for (const auto& d : plan::known_devices()) {
    fmt::print("{:<16} {:>4.0f} GiB {:>9.0f} {:>14.0f} {:>14.1f} {:>12.0f}  {}\n", d.name,
               d.memory_bytes / 1073741824.0, d.memory_bandwidth / 1e9, d.narrow_flops / 1e12,
               d.float_flops / 1e12, d.local_bandwidth / 1e9, d.source);
  }
  fmt::print("\n{:<16} {:>8}  source\n", "network", "GB/s");
  for (const auto& n : plan::known_networks()) {
    fmt::print("{:<16} {:>8.1f}  {}\n", n.name, n.node_bandwidth / 1e9, n.source);
  }
}

void print_known_as_json() {
  auto devices = nlohmann::ordered_json::array(), networks = devices;
  for (const auto& d : plan::known_devices()) {
    devices.push_back({{"name", d.name},
                       {"memory_bytes", d.memory_bytes},
                       {"memory_bandwidth", d.memory_bandwidth},
                       {"narrow_flops", d.narrow_flops},
                       {"float_flops", d.float_flops},
                       {"local_bandwidth", d.local_bandwidth},
                       {"source", d.source}});
  }
  for (const auto& n : plan::known_networks()) {
    networks.push_back(
        {{"name", n.name}, {"node_bandwidth", n.node_bandwidth}, {"source", n.source}});
  }
  fmt::print("{}\n", nlohmann::ordered_json{{"devices", devices}, {"networks", networks}}.dump(2));
}

}  // namespace

PlanCommand::PlanCommand(CLI::App& program) {
  auto& command =
      *program.add_subcommand("plan", "Say which of Ddp and Fsdp to use, and what a run will take");
  command_ = &command;
  command.footer(kPlanFooter);
  command.get_formatter()->column_width(34);
  question_.add_flags(command);
  command.add_flag("--json", json_, "Print one JSON object");
  command.add_flag("--devices", lists_, "List the devices and networks that are known");
  command.add_flag("--grpo", grpo_, "Memory of GRPO with a reference model, on 1 to 8 devices");
  auto* const grpo = command.get_option("--grpo");
  command
      .add_option("--reference", reference_, "With --grpo: resident, offloaded or none (resident)")
      ->type_name("WHERE")
      ->needs(grpo);
  const auto count = [&](const char* flag, int64_t& value, const char* text) {
    command.add_option(flag, value, text)
        ->type_name("N")
        ->check(whole_number(1, kMostOfAFlag))
        ->needs(grpo);
  };
  count("--prompts", prompts_, "With --grpo: prompts at a time on a device (1)");
  count("--group-size", group_size_, "With --grpo: texts of a prompt (4)");
  count("--prompt-tokens", prompt_tokens_, "With --grpo: tokens of the longest prompt (7067)");
  count("--new-tokens", new_tokens_, "With --grpo: tokens of a text (1024)");
  count("--update-batch", update_batch_, "With --grpo: texts of a micro-batch (1)");
}

void PlanCommand::check_grpo() const {
  constexpr std::array<std::pair<const char*, const char*>, 8> kOthers = {
      {{"--batch", "give --update-batch"},
       {"--tokens", "give --prompt-tokens and --new-tokens"},
       {"--ranks", "it counts 1 to 8 devices"},
       {"--sample", "its samples are texts"},
       {"--outputs", "its outputs are tokens"},
       {"--measured-step", "it counts memory, not time"},
       {"--bf16", "it counts weights in bfloat16 without it"},
       {"--recompute", "its update computes blocks twice without it"}}};
  for (const auto& [flag, instead] : kOthers) {
    if (command_->count(flag) == 0) continue;
    throw ConfigError(fmt::format("[plan] --grpo does not read {}: {}", flag, instead));
  }
}

int PlanCommand::plan_grpo() const {
  check_grpo();
  const std::map<std::string, plan::Reference> places = {{"resident", plan::Reference::Resident},
                                                         {"offloaded", plan::Reference::Offloaded},
                                                         {"none", plan::Reference::None}};
  const auto place = places.find(reference_);
  if (place == places.end()) {
    throw ConfigError(fmt::format("[plan] --reference {}: resident, offloaded or none{}",
                                  reference_,
                                  hint_of(reference_, {"resident", "offloaded", "none"})));
  }
  const auto config = question_.config();
  if (config.model.kind != "transformer") {
    throw ConfigError(fmt::format(
        "[plan] --grpo: model.kind {} writes no texts; it needs a transformer", config.model.kind));
  }
  const auto machine = question_.machine(config);
  const plan::GrpoOptions options = {.reference = place->second,
                                     .prompts = prompts_,
                                     .group_size = group_size_,
                                     .prompt_tokens = prompt_tokens_,
                                     .new_tokens = new_tokens_,
                                     .update_batch = update_batch_};
  const auto& sizes = config.model.transformer;
  fmt::print("{}", json_ ? plan::grpo_json(sizes, machine, options)
                         : plan::grpo_text(sizes, machine, options, columns()));
  const auto all = plan::grpo_memory(sizes, machine, options);
  return std::ranges::any_of(all, [](const auto& m) { return m.fits(); }) ? 0 : 3;
}

int PlanCommand::carry_out() const {
  if (lists_) {
    json_ ? print_known_as_json() : list_known();
    return 0;
  }
  if (grpo_) return plan_grpo();
  auto config = question_.config();
  const auto machine = question_.machine(config);
  config.mixed_precision.dtype = plan::dtype_on(machine, config);
  plan::PlanOptions options = {.ranks = question_.ranks(config, machine)};
  if (question_.has_file()) options.configured = plan::strategy_of(config);
  if (auto narrow = config; narrow.mixed_precision.dtype == "no") {
    narrow.mixed_precision.dtype = "bf16";
    options.narrow = question_.profile(narrow);
  }
  const auto plan =
      plan::make_plan(question_.profile(config), question_.training(config), machine, options);
  fmt::print("{}", json_ ? plan::plan_json(plan) : plan::plan_text(plan, columns()));
  return plan.best ? 0 : 3;
}

}  // namespace lockstep::tool
