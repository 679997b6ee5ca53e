// Configurations out of texts.
#pragma once

#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/train/config.h"
#include "support/thrown.h"

namespace lockstep::train {

// As the file run.yaml, with overrides of a command line.
inline RunConfig read(const std::string& text, const std::vector<std::string>& overrides = {}) {
  return parse_config(text, "run.yaml", overrides);
}

inline std::string refusal(const std::string& text,
                           const std::vector<std::string>& overrides = {}) {
  return test::message_of<ConfigError>([&] { read(text, overrides); });
}

}  // namespace lockstep::train
