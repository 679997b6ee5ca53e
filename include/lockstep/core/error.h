// The library's exceptions. It never exits or aborts: every error is one of these.
#pragma once

#include <stdexcept>

#include "lockstep/core/compiler.h"

namespace lockstep {

// A message says what was tried, on which rank, with which values, and what to do about it.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A rank, a transport or the network failed, or the ranks disagree. The group it came from has
// failed.
class CommError : public Error {
 public:
  using Error::Error;
};

// An option, argument or environment variable is missing, malformed or contradicts another.
class ConfigError : public Error {
 public:
  using Error::Error;
};

// A data set is missing, malformed, or an item of it could not be read.
class DataError : public Error {
 public:
  using Error::Error;
};

}  // namespace lockstep
