// What a run writes beside its checkpoints, on rank 0.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/rl/run.h"
#include "lockstep/rl/scores.h"
#include "rl/run/plan.h"
#include "rl/run/state.h"

namespace lockstep::rl {

// What results.json says beside what the run measured.
struct Facts {
  std::map<std::string, std::string> environment = {};
  int64_t parameters = 0, vocabulary = 0;
  std::string tokenizer_sha256 = {};
  std::string started = {};  // the run's first process; UTC
  Seconds seconds = {};      // of all its processes
};

// "2026-11-25T12:00:00Z"
std::string now_text();

// results.json, of a run whose stages so far have `scores`. `metrics`: the text of metrics.json, or
// nothing before the first stage is over.
std::string results_json(const RunResult& result, const Curriculum& curriculum,
                         const RunOptions& options, const RunState& state,
                         const std::vector<StageScores>& scores, const std::string& metrics,
                         const Facts& facts);

// analysis_report.md, of the texts of results.json and metrics.json: for people.
std::string analysis_report(const std::string& results, const std::string& metrics);

// The guides' figures, of the same texts: file names and their SVG. None before the first stage is
// over.
std::map<std::string, std::string> pictures(const std::string& results, const std::string& metrics);

// Replaces the file by this text. Returns what went wrong; nothing when all is well.
std::string written(const std::string& path, const std::function<std::string()>& text);
// Writes results.json, of this text, and what is made of it: pictures, the report, and, of a text
// that is not empty, metrics.json. Returns what first went wrong.
std::string write_result_files(const std::string& folder, const std::string& results,
                               const std::string& metrics);
// Makes `folder`/`name` a link to `target`, unless there is something of that name. As written().
std::string linked(const std::string& folder, const std::string& name, const std::string& target);

// What is said at the beginning, with the options that are not of the preset.
std::string header_text(const comm::World& world, const RunOptions& options, const Facts& facts);
// The matrix as lines of text.
std::string matrix_text(const RunResult& result, const Curriculum& curriculum);
// What is said at the end, of the text of metrics.json: our figures, and the guides' beside them.
std::string summary_text(const std::string& metrics);

}  // namespace lockstep::rl
