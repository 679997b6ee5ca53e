#include "lockstep/parallel/determinism.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/version.h>

#include <cfenv>
#include <limits>
#include <map>
#include <tuple>

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

// libtorch's settings by library and kind of layer, which include the older one for all products.
// That one's float32MatmulPrecision() throws once these have been set.
std::string float32_products() {
  using at::Float32Backend, at::Float32Op, at::Float32Precision;
  constexpr std::tuple<const char*, Float32Backend, Float32Op> kAll[] = {
      {"oneDNN matmul", Float32Backend::MKLDNN, Float32Op::MATMUL},
      {"oneDNN conv", Float32Backend::MKLDNN, Float32Op::CONV},
      {"oneDNN rnn", Float32Backend::MKLDNN, Float32Op::RNN},
      {"CUDA matmul", Float32Backend::CUDA, Float32Op::MATMUL}};
  std::vector<std::string> reduced;
  for (const auto& [name, backend, op] : kAll) {
    const auto precision = at::globalContext().float32Precision(backend, op);
    if (precision == Float32Precision::TF32 || precision == Float32Precision::BF16) {
      reduced.push_back(fmt::format("{} {}", name, at::precision2str(precision)));
    }
  }
  return reduced.empty() ? "exact" : fmt::format("reduced ({})", fmt::join(reduced, ", "));
}

// What this thread's arithmetic does otherwise than the standard's; empty when nothing.
std::string arithmetic() {
  std::string unusual = fegetround() == FE_TONEAREST ? "" : "not rounded to nearest";
  constexpr float kLeast = std::numeric_limits<float>::min();
  volatile float number = kLeast;  // or the compiler computes it
  number = number / 2;
  number = number * 2;
  if (number == 0) unusual += unusual.empty() ? "denormals flushed" : ", denormals flushed";
  return unusual;
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
                {"float32 products", float32_products()},
                {"deterministic algorithms", mode_name()},
                {"sums over ranks", sums(group)}}};
  if (const auto unusual = arithmetic(); !unusual.empty()) {
    report.items.emplace_back("arithmetic", unusual);
  }
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
