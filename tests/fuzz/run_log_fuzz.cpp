// The log of a run, as it may be found: whatever the bytes, it is read or skipped, and a page is
// made of what was read.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/core/error.h"
#include "lockstep/train/progress_line.h"
#include "lockstep/train/run_history.h"
#include "lockstep/train/run_report.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep::train;
  std::string_view text(reinterpret_cast<const char*>(data), size);
  RunHistory run;
  run.path = "runs/a";
  try {
    while (!text.empty()) {
      const size_t end = std::min(text.find('\n'), text.size());
      double time = 0;
      std::string fault;
      const auto record = parse_log_line(text.substr(0, end), time, fault);
      if (record) {
        run.add(*record, time);
        // What was read is written so that it is read again.
        if (!parse_log_line(log_line(*record, time), time, fault)) __builtin_trap();
      }
      text.remove_prefix(std::min(end + 1, text.size()));
    }
  } catch (const lockstep::Error&) {
    return 0;  // of a later version
  }
  report_page({run});
  run_screen(run, {.width = 80});
  return 0;
}
