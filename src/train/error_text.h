// What an exception says, without the backtrace that libtorch's have.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace lockstep::train {

inline std::string text_of(const std::exception& error) {
  const auto* const torch = dynamic_cast<const c10::Error*>(&error);
  return torch != nullptr ? torch->what_without_backtrace() : error.what();
}

}  // namespace lockstep::train
