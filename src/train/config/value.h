// A key's value: from YAML, and back to it.
#pragma once

#include <yaml-cpp/yaml.h>

#include <string>

#include "lockstep/train/config_extensions.h"

namespace lockstep::train {

// What a key takes, in words: "a whole number", "true or false", "a list of texts".
std::string type_of(const Value& example);

// The node as a value of the type of `example`; on failure `error` says what was expected. A single
// value does for a list of one.
bool read_value(const YAML::Node& node, const Value& example, Value& value, std::string& error);

// As YAML, on one line, such that read_value() gives the same value back.
std::string text_of(const Value& value);
// A text as YAML: quoted where it has to be.
std::string quoted(const std::string& text);
// The shortest form that reads back to the same number.
std::string text_of_number(double number);

// A node's text for error messages: at most some 40 characters.
std::string excerpt(const YAML::Node& node);

}  // namespace lockstep::train
