// What the examples' main() functions share: the command line, and errors made into exit statuses.
#pragma once

#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

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

// Reads the options and runs the program. Returns the exit status: 2 when the user asked for
// something impossible, 1 when something else went wrong. Under `lockstep run` the first rank that
// fails ends the job.
template <class Body>
int run(CLI::App& app, int argc, char** argv, const Body& body) {
  setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // lines appear when they are complete, in a pipe too
  try {
    app.parse(argc, argv);
    body();
    return 0;
  } catch (const CLI::Success& asked) {  // --help
    return app.exit(asked);
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
