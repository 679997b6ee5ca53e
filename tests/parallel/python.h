// What Python computes, for comparison.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

namespace lockstep::test {

// What the program wrote to standard output; fails the test unless it ended well.
inline std::string output_of(const std::string& command) {
  std::string text;
  FILE* pipe = popen(command.c_str(), "r");
  char chunk[4096];
  while (const size_t n = fread(chunk, 1, sizeof chunk, pipe)) text.append(chunk, n);
  EXPECT_EQ(pclose(pipe), 0) << command;
  return text;
}

// The numbers that `tests/parallel/reference.py CASE` prints. Called before the ranks are spawned.
inline std::vector<double> python_numbers(const std::string& test_case) {
  const std::string command = fmt::format("{} {}/tests/parallel/reference.py {}",
                                          LOCKSTEP_PEERS_PYTHON, LOCKSTEP_SOURCE_DIR, test_case);
  std::vector<double> numbers;
  std::istringstream words(output_of(command));
  for (std::string word; words >> word;) numbers.push_back(std::stod(word));
  EXPECT_FALSE(numbers.empty()) << command;
  return numbers;
}

}  // namespace lockstep::test
