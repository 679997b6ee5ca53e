// The program `lockstep`, run to its end.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

namespace lockstep::test {

struct Outcome {
  int status = -1;
  std::string said;  // stdout and stderr
};

// A command, in a shell's words.
inline Outcome shell(const std::string& command) {
  FILE* pipe = popen(("exec 2>&1; " + command).c_str(), "r");
  EXPECT_NE(pipe, nullptr);
  Outcome outcome;
  std::array<char, 4096> piece{};
  while (const size_t count = fread(piece.data(), 1, piece.size(), pipe)) {
    outcome.said.append(piece.data(), count);
  }
  const int status = pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

// `lockstep ARGS`, in a shell's words.
inline Outcome lockstep_tool(const std::string& args) {
  return shell(fmt::format("{}/bin/lockstep {}", LOCKSTEP_BINARY_DIR, args));
}

}  // namespace lockstep::test
