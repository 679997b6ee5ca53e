// Text for terminals.
#pragma once

#include <string>

#include "lockstep/train/progress_line.h"

namespace lockstep::train {

// Of ANSI's.
enum class Color { None = 0, Bold = 1, Dim = 2, Red = 31, Green = 32, Yellow = 33, Blue = 34 };

// As it is, where the style has no colour.
std::string colored(const std::string& text, Color color, const TextStyle& style);

// Broken between words; lines after the first one are indented. `width` 0: not broken.
std::string wrapped(const std::string& text, int width, size_t indent);

}  // namespace lockstep::train
