// A run's log as a page that one looks at. Needs no torch.
#pragma once

#include <string>
#include <vector>

#include "lockstep/train/run_history.h"

namespace lockstep::train {

// A conclusion from a run's log in words, shown before the charts.
struct Finding {
  // Whether it is good or bad.
  enum class Tone { Good, Plain, Bad };
  Tone tone = Tone::Plain;
  std::string title;  // "Rank 2 is slow"
  std::string text;   // with figures, and what to do
};

// How the run ended, whether the losses of training and of evaluations fell, where the time went,
// who is slow, who has how much memory, and what happened, in this order.
std::vector<Finding> findings_of(const RunHistory& run);

// Options of a page.
struct PageOptions {
  std::string trace = {};  // trace.json of the first run, as a path from the page's folder; or none
};

// One HTML file that needs no network: the first run, and the others beside it for comparison. All
// that a log contains is shown as text, never as HTML. At most about 1 MB, independent of the runs'
// length and number of ranks. Throws ConfigError without a run.
std::string report_page(const std::vector<RunHistory>& runs, const PageOptions& options = {});

}  // namespace lockstep::train
