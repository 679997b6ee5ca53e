#include "doctor.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "launch/diagnosis/doctor.h"

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;

// Beside this program, built or installed; otherwise where the loader looks.
std::string library() {
  std::error_code error;
  const fs::path bin = fs::read_symlink("/proc/self/exe", error).parent_path();
  for (const char* folder : {"../lib", "../lib64", "../lib/x86_64-linux-gnu"}) {
    const fs::path file = bin / folder / "liblockstep.so";
    if (fs::exists(file, error)) return file.lexically_normal();
  }
  return "liblockstep.so";
}

}  // namespace

void add_doctor(CLI::App& program) {
  program.add_subcommand("doctor", "Look for what could keep jobs on this host from running");
}

int examine() {
  constexpr std::array kMarks = {"ok     ", "warning", "PROBLEM"};
  const auto findings = launch::examine_host(library());
  for (const auto& finding : findings) {
    fmt::print("{}  {}\n", kMarks[finding.kind], finding.what);
    if (!finding.cure.empty()) fmt::print("         -> {}\n", finding.cure);
  }
  return std::any_of(findings.begin(), findings.end(),
                     [](const auto& one) { return one.kind == launch::Finding::Problem; })
             ? 1
             : 0;
}

}  // namespace lockstep::tool
