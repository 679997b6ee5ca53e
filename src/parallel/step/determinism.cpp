#include "lockstep/parallel/determinism.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/version.h>

#include <map>

#include "comm/transport.h"
#include "core/process/processor.h"
#include "lockstep/core/environment.h"

namespace lockstep::parallel {
namespace {

// "on", and the environment variable that narrows it when set.
std::string library(bool used, const char* variable) {
  const auto value = env_text(variable);
  return std::string(used ? "on" : "off") +
         (value ? fmt::format(" ({}={})", variable, *value) : "");
}

std::string mode_name() {
  const auto& context = at::globalContext();
  if (!context.deterministicAlgorithms()) return "off";
  return context.deterministicAlgorithmsWarnOnly() ? "warn" : "on";
}

std::string sums(const Group& group) {
  if (const int64_t lanes = group.transport().lanes()) {
    return fmt::format("fixed tree over {} lanes", lanes);
  }
  if (group.size() == 1) return "none";
  return fmt::format("{} over {} ranks ({})",
                     group.deterministic() ? "fixed tree" : "the library's order", group.size(),
                     group.backend());
}

}  // namespace

void use_deterministic_algorithms(Deterministic mode) {
  auto& context = at::globalContext();
  context.setDeterministicAlgorithms(mode != Deterministic::Off, mode == Deterministic::Warn);
  context.setDeterministicCuDNN(mode != Deterministic::Off);
  if (mode != Deterministic::Off) context.setBenchmarkCuDNN(false);
}

DeterminismReport determinism_report(const Group& group) {
  const std::string processor = processor_name();
  DeterminismReport report{
      .items = {{"libtorch", TORCH_VERSION},
                // MKL and oneDNN choose kernels by it, beyond libtorch's own instruction set.
                {"processor", processor.empty() ? "unknown" : processor},
                {"instruction set", at::get_cpu_capability()},
                {"threads", std::to_string(at::get_num_threads())},
                {"oneDNN", library(at::globalContext().userEnabledMkldnn(), "ONEDNN_MAX_CPU_ISA")},
                {"MKL", library(at::hasMKL(), "MKL_CBWR")},
                {"float32 products",
                 at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::HIGHEST
                     ? "exact"
                     : "reduced"},
                {"deterministic algorithms", mode_name()},
                {"sums over ranks", sums(group)}}};
  if (const auto workspace = env_text("CUBLAS_WORKSPACE_CONFIG")) {
    report.items.emplace_back("cuBLAS workspace", *workspace);
  }
  return report;
}

std::string DeterminismReport::text() const {
  std::vector<std::string> parts;
  for (const auto& [name, value] : items) parts.push_back(name + " " + value);
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::vector<std::string> DeterminismReport::differences(const DeterminismReport& other) const {
  const std::map<std::string, std::string> there(other.items.begin(), other.items.end());
  const std::map<std::string, std::string> here(items.begin(), items.end());
  std::vector<std::string> found;
  for (const auto& [name, value] : items) {
    const auto match = there.find(name);
    const std::string theirs = match == there.end() ? "nothing" : match->second;
    if (value != theirs) found.push_back(fmt::format("{}: {} here, {} there", name, value, theirs));
  }
  for (const auto& [name, value] : other.items) {
    if (!here.contains(name))
      found.push_back(fmt::format("{}: nothing here, {} there", name, value));
  }
  return found;
}

}  // namespace lockstep::parallel
