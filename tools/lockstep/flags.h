// Flags as torchrun has them: two spellings, a variable each, and some that cannot be honoured.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::tool {

// "--nproc-per-node,--nproc_per_node"; what has no dash inside stays as it is. A short name, as in
// "-r,--redirects", comes first.
std::string both_spellings(const std::string& name);

// PET_NPROC_PER_NODE for --nproc-per-node, as torchrun has it.
std::string variable_of(std::string_view name);

// A flag that is known, but of which only some values, or none, can be honoured.
struct Limited {
  std::string name;
  std::vector<std::string> values;  // that change nothing here
  const char* reason;               // why others cannot be
  bool takes_value = true;
};

const std::vector<Limited>& limited_flags();

// Adds them to `command`, hidden from its help.
void add_limited_flags(CLI::App& command);

// Throws ConfigError for those that were given, on the command line or as a variable, with a value
// that cannot be honoured.
void refuse_limited_flags(const CLI::App& command);

// The option that `word` ("--tee=3", "-t3", "--tee") is about; null when there is none.
// `value_follows`: the next word is its value.
const CLI::Option* option_of(const CLI::App& command, const std::string& word, bool& value_follows);

// Throws ConfigError that names the nearest known flag.
[[noreturn]] void refuse_flag(const CLI::App& command, const std::string& word);

// Help with one spelling of each flag.
std::shared_ptr<CLI::FormatterBase> flag_formatter();

}  // namespace lockstep::tool
