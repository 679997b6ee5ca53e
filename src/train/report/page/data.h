// What the page's charts are drawn from.
#pragma once

#include <string>
#include <vector>

#include "lockstep/train/run_history.h"

namespace lockstep::train {

// JSON that may stand in a <script>: report.js reads it.
std::string page_data(const std::vector<RunHistory>& runs);

// A metric of evaluations, or another value of the program's.
struct FurtherSeries {
  std::string name;  // in the page's data
  std::string title;
  const Series* series = nullptr;  // the run's
};
// Those that the page shows: the first ones of very many.
std::vector<FurtherSeries> further_series(const RunHistory& run);

// The most ranks that there were at a time.
size_t most_ranks(const RunHistory& run);

// What a run is called: the last `folders` parts of its folder's path.
std::string label_of(const RunHistory& run, size_t folders = 1);
// What runs are called beside each other: with as much of their paths as tells them apart.
std::vector<std::string> labels_of(const std::vector<RunHistory>& runs);

}  // namespace lockstep::train
