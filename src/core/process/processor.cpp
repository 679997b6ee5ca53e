#include "core/process/processor.h"

#include <fstream>
#include <string_view>

namespace lockstep {
namespace {

// The value of the first line of /proc/cpuinfo with this key; empty without one.
std::string described(std::string_view key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    const size_t colon = line.find(": ");
    return colon == std::string::npos ? "" : line.substr(colon + 2);
  }
  return "";
}

bool has_word(const std::string& words, const std::string& word) {
  return (" " + words + " ").find(" " + word + " ") != std::string::npos;
}

}  // namespace

std::string processor_name() { return described("model name"); }

// The kernel lists an instruction set only where it also saves its registers.
std::string native_bf16_cpu() {
#if defined(__x86_64__)
  const std::string flags = described("flags");
  if (has_word(flags, "amx_bf16")) return "AMX";
  if (has_word(flags, "avx512_bf16")) return "AVX512_BF16";
#elif defined(__aarch64__)
  if (has_word(described("Features"), "bf16")) return "Arm BF16";
#endif
  return "";
}

}  // namespace lockstep
