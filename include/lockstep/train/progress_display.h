// The line that says how a run goes, on a terminal or elsewhere. Needs no torch.
#pragma once

#include <chrono>
#include <iosfwd>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/train/progress_line.h"

namespace lockstep::train {

// What rank 0 prints during a run. On a terminal, also under the launcher, it is one line
// that is written over several times a second and fits the width; elsewhere each line stays. For
// one thread.
class ProgressDisplay {
 public:
  // Prints to `out`, which has to outlive this: as it suits the file where it is std::cout, plain
  // lines otherwise.
  explicit ProgressDisplay(std::ostream& out);
  ProgressDisplay(std::ostream& out, const TextStyle& style);

  // Whether the line is written over; then show() has an effect when is_due().
  bool rewrites() const { return style_.rewrites; }
  // 0.2 s after the last line.
  bool is_due() const;

  // Prints progress_line(). A line that is not due yet waits: finish() prints the last one. The
  // run's last step is due at once.
  void show(const StepReport& report, const RunExtent& extent);
  // What ranks do, for reports that do not know of more than their own.
  void note_ranks(std::vector<RankFigures> ranks) { ranks_ = std::move(ranks); }
  // A line that stays, as of an evaluation; what the program itself prints does not mix with the
  // line that is written over when it goes through here.
  void print(std::string_view line);
  // Something else will be printed: takes the line that is written over away.
  void clear();
  // The last line stays.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;

  struct Figures {
    StepReport report;
    RunExtent extent;
  };
  void write(Figures figures, bool stays);
  void smooth(Figures& figures);

  std::ostream& out_;
  TextStyle style_;
  bool follows_ = false;  // the style is that of a terminal whose width may change
  bool is_open_ = false;  // the cursor stands at the beginning of a line that may be written over
  Clock::time_point next_ = {};
  std::vector<RankFigures> ranks_ = {};
  std::optional<Figures> waiting_ = {}, last_ = {};
};

}  // namespace lockstep::train
