// What the examples' main() functions share: the command line, and errors made into exit statuses.
#pragma once

#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/flight.h"

namespace example {

inline int fail(const std::string& text, int status,
                lockstep::flight::Blame blame = lockstep::flight::Blame::Own) {
  lockstep::flight::report_failure(text, blame);
  const char* rank = std::getenv("RANK");
  const std::string where = rank != nullptr ? " on rank " + std::string(rank) : "";
  std::fprintf(stderr, "error%s: %s\n", where.c_str(), text.c_str());
  return status;
}

// For options that have to be above zero, and for those that may be zero.
inline CLI::Validator positive() {
  return CLI::Validator(
      [](std::string& text) {
        double value = 0;
        const bool good = CLI::detail::lexical_cast(text, value) && value > 0;
        return good ? std::string() : "has to be a number above 0, not " + text;
      },
      "");
}
inline CLI::Validator not_negative() {
  return CLI::Validator(
      [](std::string& text) {
        double value = 0;
        const bool good = CLI::detail::lexical_cast(text, value) && value >= 0;
        return good ? std::string() : "has to be a number, 0 or above, not " + text;
      },
      "");
}

// Throws ConfigError for batches of all ranks together that are larger than the data.
inline void check_batch_size(int64_t batch_size, int ranks, int64_t samples, const char* what) {
  if (batch_size <= samples / ranks) return;
  throw lockstep::ConfigError("--batch-size " + std::to_string(batch_size) + " on " +
                              std::to_string(ranks) + " ranks is more than the " +
                              std::to_string(samples) + " " + what + ": lower it");
}

// --batch-size and --lr, into members of these names: batch_size and learning_rate.
template <class Options>
void add_training_options(CLI::App& app, Options& options) {
  app.add_option("--batch-size", options.batch_size, "per rank")
      ->check(positive())
      ->capture_default_str();
  app.add_option("--lr", options.learning_rate, "learning rate")
      ->check(positive())
      ->capture_default_str();
}

// How many letters have to be changed to make one word of the other (Levenshtein's distance).
inline size_t edits_between(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1] ? 1 : 0);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

// The option of the program whose name is the nearest to `word`, such as "--num-gpus". "" where
// none begins with `word`, or differs from it in two letters, or a third of them, or less.
inline std::string nearest_option(const CLI::App& app, const std::string& word) {
  std::string nearest;
  for (const CLI::Option* option : app.get_options()) {
    for (const auto& letters : option->get_lnames()) {
      const std::string name = "--" + letters;
      const size_t longer = std::max(word.size(), name.size()) - 2;
      const size_t most = std::min(longer - 1, std::max<size_t>(2, longer / 3));
      if (!name.starts_with(word) && edits_between(word, name) > most) continue;
      const bool is_nearer =
          nearest.empty() || edits_between(word, name) < edits_between(word, nearest);
      if (is_nearer) nearest = name;
    }
  }
  return nearest;
}

// CLI11 takes the next word for the value of "--name=", even when it is another option.
inline void check_word(const std::string& word) {
  if (!word.starts_with("--") || word.find('=') != word.size() - 1) return;
  throw lockstep::ConfigError(word + " has no value: give one, or leave it out (see --help)");
}

// Values that CLI11 takes without a word: another option, no text for 0, and a whole number of more
// than 64 bits for the largest one.
inline void check_values(const CLI::Option& option) {
  if (option.get_expected_max() == 0) return;  // it takes none
  const std::string type = option.get_type_name();
  const bool is_whole = type.starts_with("INT");
  for (const std::string& text : option.results()) {
    std::string problem;
    errno = 0;
    if (text.starts_with("--")) {
      problem = " has no value: " + text + " follows it";
    } else if (text.empty() && (is_whole || type.starts_with("FLOAT"))) {
      problem = " has an empty value, which is not a number";
    } else if (is_whole && (std::strtoll(text.c_str(), nullptr, 0), errno == ERANGE)) {
      problem = " " + text + " is out of range: it has to fit into 64 bits";
    }
    if (!problem.empty()) {
      throw lockstep::ConfigError(option.get_name() + problem + " (see --help)");
    }
  }
}

// For what the program does not know.
inline std::string unknown_words(const CLI::App& app) {
  for (const std::string& word : app.remaining()) {
    if (!word.starts_with("--")) continue;
    const std::string name = word.substr(0, word.find('='));
    const std::string nearest = nearest_option(app, name);
    return "unknown option " + name + (nearest.empty() ? "" : "; the nearest is " + nearest) +
           " (see --help)";
  }
  return "unknown word " + app.remaining().front() + " (see --help)";
}

// The exit status of a program whose result is what it printed: not 0 where that is lost, as on a
// full disk.
inline int with_output(int status) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  const std::string why = std::strerror(errno);
  return fail("stdout cannot be written: " + why + ": make room, or redirect it to another place",
              1);
}

// Where what a program has done is to be found.
enum class Result { Printed, InFiles };

// Reads the options and runs the program. Returns the exit status: 2 when the user asked for
// something impossible, 1 when something else went wrong. Under `lockstep run` the first rank that
// fails ends the job.
template <class Body>
int run(CLI::App& app, int argc, char** argv, const Body& body, Result result = Result::Printed) {
  setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // lines appear when they are complete, in a pipe too
  try {
    for (int i = 1; i < argc; ++i) check_word(argv[i]);
    app.parse(argc, argv);
    for (const CLI::Option* option : app.get_options()) check_values(*option);
    body();
    return result == Result::Printed ? with_output(0) : 0;
  } catch (const CLI::Success& asked) {  // --help
    return with_output(app.exit(asked));
  } catch (const CLI::ExtrasError&) {
    return fail(unknown_words(app), 2);
  } catch (const CLI::ParseError& error) {
    return fail(std::string(error.what()) + " (see --help)", 2);
  } catch (const lockstep::ConfigError& error) {
    return fail(error.what(), 2);
  } catch (const lockstep::CommError& error) {
    return fail(error.what(), 1, lockstep::flight::Blame::Peer);
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace(), 1);
  } catch (const std::exception& error) {
    return fail(error.what(), 1);
  }
}

}  // namespace example
