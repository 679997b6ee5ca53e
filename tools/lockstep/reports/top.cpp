#include "reports/top.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "flags.h"
#include "lockstep/train/progress_line.h"
#include "lockstep/train/run_history.h"

namespace lockstep::tool {
namespace {

constexpr const char* kTopFooter =
    R"(RUN is the output folder of a run on any number of hosts, with metrics.jsonl in it: the log has the figures of all
ranks, so one look is enough, from any shell that sees the folder. Ends with the run, or by Ctrl-C, which does the run no
harm. Without a terminal it prints the state once.

  lockstep top runs/a
)";

int terminal_lines() {
  winsize size{};
  return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row > 0 ? size.ws_row : 40;
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

TopCommand::TopCommand(CLI::App& program) {
  auto& command = *program.add_subcommand("top", "Show a run's figures while it runs");
  command.add_option("RUN", run_, "The run's folder, or its metrics.jsonl")->required();
  command.add_option("--every", every_, "Seconds between two looks (1)")
      ->type_name("SECONDS")
      ->check(some_seconds(3600));
  command.add_flag("--once", once_, "Print the state once");
  command.footer(kTopFooter);
}

int TopCommand::carry_out() const {
  train::RunLogReader reader(run_);
  train::RunHistory run;
  const bool live = !once_ && train::is_terminal(STDOUT_FILENO);
  if (!live) {
    reader.finish(run);
    // Throws, and says what is wrong with it.
    if (run.starts.empty() && run.skipped_lines > 0) static_cast<void>(train::read_run(run_));
    fmt::print("{}", train::run_screen(run, train::TextStyle::of_file(STDOUT_FILENO), 1 << 20,
                                       seconds_since_1970()));
    return 0;
  }
  while (true) {
    reader.poll(run);
    const int lines = terminal_lines() - 1;  // the cursor is on the last one
    const std::string screen = train::run_screen(run, train::TextStyle::of_file(STDOUT_FILENO),
                                                 lines, seconds_since_1970());
    // From the top left corner, and without what is below: the screen does not flicker.
    fmt::print("\x1b[H");
    for (size_t begin = 0; begin < screen.size();) {
      const size_t end = screen.find('\n', begin);
      fmt::print("{}\x1b[K\n", screen.substr(begin, end - begin));
      begin = end + 1;
    }
    fmt::print("\x1b[J");
    std::fflush(stdout);
    if (run.end) return 0;
    std::this_thread::sleep_for(std::chrono::duration<double>(every_));
  }
}

}  // namespace lockstep::tool
