#include "reports/report.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstring>
#include <filesystem>

#include "core/files/whole_file.h"
#include "flags.h"
#include "lockstep/core/error.h"
#include "lockstep/train/progress_line.h"
#include "lockstep/train/run_report.h"

namespace lockstep::tool {
namespace {

constexpr const char* kReportFooter =
    R"(RUN is the output folder of a run, with metrics.jsonl in it, or such a file; the run may still be in progress. The page is
one file that needs no network: loss, throughput, work of each rank, memory, events, configuration. docs/report.md.

  lockstep report runs/a
  lockstep report runs/a --compare runs/b runs/c -o comparison.html

Exit status: 0; 1 when a log cannot be read or the page not be written; 2 for wrong arguments.
)";

// The trace beside a log, as a path from the page's folder; empty where there is none.
std::string trace_beside(const std::filesystem::path& log, const std::filesystem::path& page) {
  std::error_code error;
  const auto trace = log.parent_path() / "trace.json";
  if (!std::filesystem::is_regular_file(trace, error)) return "";
  const auto folder = std::filesystem::absolute(page, error).parent_path();
  return std::filesystem::relative(trace, folder, error).string();
}

}  // namespace

ReportCommand::ReportCommand(CLI::App& program) {
  auto& command = *program.add_subcommand(
      "report", "Make a page of a run: what it learned, where its time went");
  command.add_option("RUN", run_, "The run's folder, or its metrics.jsonl")->required();
  command.add_option("--compare", others_, "Runs to show beside it")->type_name("RUN");
  command.add_option("-o,--output", output_, "The file to write (report.html in the run's folder)")
      ->type_name("FILE");
  command.footer(kReportFooter);
}

int ReportCommand::carry_out() const {
  std::vector<train::RunHistory> runs{train::read_run(run_)};
  for (const auto& other : others_) runs.push_back(train::read_run(other));
  std::string path = output_;
  if (path.empty()) {
    const auto log = std::filesystem::path(runs.front().path);
    path = (log.parent_path() / "report.html").string();
  }
  const auto page = train::report_page(runs, {.trace = trace_beside(runs.front().path, path)});
  // A browser that looks meanwhile sees a whole page.
  if (const int error = write_whole_file(path, page); error != 0) {
    throw Error(fmt::format("[report] cannot write {}: {}; name another file with -o FILE", path,
                            std::strerror(error)));
  }
  if (is_stream(path)) return 0;  // the page may be in the standard output
  for (const auto& finding : train::findings_of(runs.front())) {
    const bool bad = finding.tone == train::Finding::Tone::Bad;
    fmt::print("{} {}. {}\n", bad ? "!" : "-", train::printable(finding.title),
               train::printable(finding.text));
  }
  fmt::print("{}\n", path);
  return 0;
}

}  // namespace lockstep::tool
