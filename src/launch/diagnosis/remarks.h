// The coordinator's messages to its user about other launchers.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "launch/rendezvous/network/message.h"
#include "launch/rendezvous/timing.h"

namespace lockstep::launch {

// Pure, as the coordinator.
class Remarks {
 public:
  explicit Remarks(Time now) { on_gathering(now); }

  // The coordinator's answer to a launcher: a line for a refusal and for the first Wait.
  void on_answer(const Join& join, const Message& answer);
  void on_spare(const Join& join, size_t places);
  void on_notified(const Join& join);
  void note_refusal(const std::string& text) { refusal_ = "; the last one refused: " + text; }
  // "; the last one refused: ..."; empty when none was.
  const std::string& last_refusal() const { return refusal_; }

  // All ranks of this many hosts have exited with status 0, but for those of the hosts in `late`.
  void on_late(size_t hosts, const std::vector<std::string>& late, const Timing& timing);

  struct Gathered {
    std::string where;  // the coordinator's address
    std::string who;    // is here, and missing
    size_t ready = 0;
    bool is_fenced = false;  // ranks of a lost host may be alive
  };
  // No rank runs: a line once that has taken a while, and further ones, at intervals, about
  // changes.
  void on_gathering(Time now);
  void on_waiting(const Gathered& gathered, const JobSpec& job_spec, const Timing& timing,
                  Time now);
  Time due() const { return due_; }

  std::vector<std::string> take() { return std::exchange(lines_, {}); }

 private:
  Time due_{};
  std::string last_, refusal_;
  std::set<uint64_t> told_to_wait_;  // launchers
  std::vector<std::string> lines_;
};

// The message for a launcher for which there is no place in the job.
std::string words_for_a_spare(size_t places);

// The message for a launcher that comes when the job's ranks have been told of a preemption.
std::string words_for_the_notified();

// "; host4 in place of host1": which hosts have replaced those that are gone, each given as
// launcher and host.
std::string successors(const std::map<uint64_t, std::string>& before,
                       const std::map<uint64_t, std::string>& now);

}  // namespace lockstep::launch
