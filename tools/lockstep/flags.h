// Flags as torchrun has them: two spellings, a variable each, and some that cannot be honoured.
#pragma once

#include <CLI/CLI.hpp>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::tool {

// "--nproc-per-node,--nproc_per_node"; what has no dash inside stays as it is. A short name, as in
// "-r,--redirects", comes first.
std::string both_spellings(const std::string& name);

// PET_NPROC_PER_NODE for --nproc-per-node, as torchrun has it; where that is not set, and one by
// which others set the flag is, that one.
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

// Throws ConfigError that says what mpirun's and srun's flag `word` is called here, or names the
// nearest known flag. `next`: the word after it, if any.
[[noreturn]] void refuse_flag(const CLI::App& command, const std::string& word,
                              const std::string& next);

// The first of `words` that is a flag and none of the command's, with what was meant by it:
// "--bath; the nearest is --batch". "" where there is none.
std::string about_unknown_flag(const CLI::App& command, const std::vector<std::string>& words);

// The group of the flags that are taken but not shown by --help. CLI11's own way of hiding them, an
// empty group, also takes their names out of error messages.
constexpr const char* kHidden = "Hidden";

// What a flag's value may be. Their errors quote the value and say what would do.
CLI::Validator whole_number(int least, int most);
CLI::Validator not_negative();             // a number
CLI::Validator seconds(double most);       // 0 and more
CLI::Validator some_seconds(double most);  // more than 0
CLI::Validator one_of(std::initializer_list<const char*> words);

// Help with one spelling of each flag, and its short name.
std::shared_ptr<CLI::FormatterBase> flag_formatter(const std::string& usage);

}  // namespace lockstep::tool
