// The runs of a sweep, as processes.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace lockstep::tool {

struct SweepRun {
  std::string name;                  // "run-003"
  std::string folder;                // its output_dir
  std::vector<std::string> chosen;   // "training.seed=3": what differs from the other runs
  std::vector<std::string> command;  // with its arguments
  bool restores_best = false;        // it leaves the model of its best checkpoint
  bool has_threads = false;          // it says itself how many threads a rank has
  int status = -1;                   // as a shell has it; -1: it has not run
};

// Runs them, at most `jobs` at a time, in their order, each with its output in FOLDER/log.txt and
// `environment` where there is no variable of that name, without OMP_NUM_THREADS where the run says
// its threads itself. A signal that stops this process stops
// them: its number, or 0. `ended` is called after each.
template <class Ended>
int carry_out(std::vector<SweepRun>& runs, int jobs,
              const std::map<std::string, std::string>& environment, const Ended& ended);

// Signals that stop a sweep, and its children's ends, taken one at a time.
class Children {
 public:
  Children();
  ~Children();
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  // Starts it. Throws Error.
  void start(size_t index, const SweepRun& run,
             const std::map<std::string, std::string>& environment);
  size_t running() const { return running_.size(); }
  struct Ended {
    size_t index;
    int status;
  };
  // Waits for a child to end. Signals to stop are passed on to all children meanwhile.
  Ended wait();
  // The first signal to stop, or 0.
  int signal() const { return signal_; }

 private:
  std::map<int, size_t> running_;  // by process
  int signal_ = 0;
};

template <class Ended>
int carry_out(std::vector<SweepRun>& runs, int jobs,
              const std::map<std::string, std::string>& environment, const Ended& ended) {
  Children children;
  for (size_t next = 0; (next < runs.size() && children.signal() == 0) || children.running() > 0;) {
    if (next < runs.size() && children.signal() == 0 &&
        children.running() < static_cast<size_t>(jobs)) {
      children.start(next, runs[next], environment);
      ++next;
      continue;
    }
    const auto [index, status] = children.wait();
    runs[index].status = status;
    ended(runs[index]);
  }
  return children.signal();
}

}  // namespace lockstep::tool
