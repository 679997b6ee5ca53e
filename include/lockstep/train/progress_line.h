// A run's state as text for a terminal. Needs no torch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/train/run_history.h"
#include "lockstep/train/run_log.h"

namespace lockstep::train {

// How lines are written.
struct TextStyle {
  int width =
      100;  // columns; lines are shortened to fit by leaving out the last parts. 0: no limit
  bool color = false;
  bool rewrites = false;  // a line may be written over by the next one

  // The style for a stream's file: its width where it is a terminal, or where the launcher passes
  // what is written on to one (LOCKSTEP_COLUMNS); otherwise no limit. Only on a terminal lines are
  // written over, and have colour unless NO_COLOR is set or TERM is dumb.
  static TextStyle of_file(int descriptor);
};

// Whether it is a terminal that can write over a line.
bool is_terminal(int descriptor);

// How long a run is.
struct RunExtent {
  int64_t steps = 0;        // that it will have; 0: not known
  int64_t epochs = 0;       // of the stage; 0: not known
  std::string stage = {};   // its name; empty without stages
  double step_seconds = 0;  // that a step to come takes; 0: as long as the report's
  // The time of evaluations and checkpoints for each step to come, beside its own time.
  double pause_seconds = 0;
};

// "epoch 1/2  step 400/938  42 %  loss 0.3121  lr 0.001  norm 1.2  12,345 samples/s  8 s left
// slowest: rank 2 (1.4x)", then the program's own values. The loss is the mean since the line
// before, where the report has it. The slowest rank is named where it works 1.1 times as long as
// the median of the others, or longer. Where not all of it fits, what matters least is left out.
std::string progress_line(const StepReport& report, const RunExtent& extent = {},
                          const TextStyle& style = {});

// "warning: rank 2 works ...: what to do", in several lines where it is long.
std::string warning_text(const Event& event, const TextStyle& style = {});

// One line without control characters, which would be commands to a terminal.
std::string printable(std::string_view text);

// A run's state as several lines: what `lockstep top` shows. At most `most_lines` lines; of many
// ranks the slowest. `now`, in seconds since 1970: where the last line of the log is much older
// than reports are apart, that is said; 0: it is not looked at.
std::string run_screen(const RunHistory& run, const TextStyle& style = {}, int most_lines = 40,
                       double now = 0);

}  // namespace lockstep::train
