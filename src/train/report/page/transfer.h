// What a run over several domains has kept of each: the matrix of rewards in the page.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "lockstep/train/run_history.h"

namespace lockstep::train {

// The matrix in the text of a metrics.json (docs/three_domain_metrics.md); nothing when there is
// none in it.
std::optional<Transfer> transfer_of(std::string_view metrics_json);

// The section of the page; empty without one.
std::string transfer_section(const RunHistory& run);

}  // namespace lockstep::train
