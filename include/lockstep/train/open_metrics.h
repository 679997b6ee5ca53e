// The last report as OpenMetrics text, for Prometheus. Needs no torch.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/train/run_log.h"

namespace lockstep::train {

// lockstep_step, lockstep_loss, lockstep_samples, and by rank lockstep_step_seconds{rank,kind} and
// lockstep_memory_bytes{rank}; each with the label run. lockstep_loss is shown_loss(). Ends with
// "# EOF".
std::string open_metrics(const StepReport& report, std::string_view run);

// Writes the text to a file that the textfile collector of node_exporter reads: beside it first,
// then by one rename, so that a reader never sees half of it. Returns whether it succeeded.
bool write_open_metrics(const std::string& path, const StepReport& report, std::string_view run);

}  // namespace lockstep::train
