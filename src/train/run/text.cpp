#include "train/run/text.h"

#include <fmt/format.h>

namespace lockstep::train {

std::string megabytes(double bytes) {
  if (bytes >= 1e9) return fmt::format("{:.1f} GB", bytes / 1e9);
  return fmt::format("{:.1f} MB", bytes / 1e6);
}

}  // namespace lockstep::train
