#include "launch/job/attempt.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/control.h"
#include "core/flight/segment.h"
#include "core/network/address.h"
#include "launch/diagnosis/failure_summary.h"
#include "launch/job/background.h"
#include "launch/job/worker_group.h"
#include "launch/process/binding.h"
#include "launch/process/child.h"
#include "launch/process/environment.h"
#include "lockstep/core/environment.h"

namespace lockstep::launch {

namespace {

// "[default0]:" of "[${role_name}${local_rank}]:"
std::string expanded(std::string text, const std::map<std::string, std::string>& values) {
  for (const auto& [name, value] : values) {
    const std::string mark = "${" + name + "}";
    for (size_t at = 0; (at = text.find(mark, at)) != std::string::npos; at += value.size()) {
      text.replace(at, mark.size(), value);
    }
  }
  return text;
}

// How wide a line may be after the tag in the terminal that stdout goes to; 0 where it goes to
// none, or to one that cannot write over a line.
int columns_behind(const std::string& tag) {
  winsize size{};
  const bool is_capable = env_text("TERM").value_or("dumb") != "dumb";
  if (!is_capable || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return 0;
  return std::max(0, size.ws_col - static_cast<int>(tag.size()));
}

// Whether stdin may be read: not by a job in the background of a terminal. The kernel would stop it
// (SIGTTIN), but not a rank, which has a session of its own and would take what is typed to the
// shell.
bool may_read_input() {
  const pid_t in_foreground = tcgetpgrp(STDIN_FILENO);  // fails without a terminal
  return in_foreground < 0 || in_foreground == getpgrp();
}

// Starts the ranks of one attempt.
class Starter {
 public:
  // `files`: one for each local rank.
  Starter(Session& session, Plan& plan, const Control& control, const flight::Segment& flight,
          std::vector<Logs::Files> files)
      : session_(session),
        options_(session.options),
        plan_(plan),
        control_(control),
        flight_(flight),
        files_(std::move(files)) {
    const std::string folder = session.logs.attempt(plan.restarts);
    const auto target = [&](const std::vector<std::string>& filters, const char* name) {
      return filters.empty() ? nullptr : std::make_shared<Writer::Target>(folder + name);
    };
    filtered_out_ = target(options_.out_filters, Logs::kFilteredOut);
    filtered_err_ = target(options_.err_filters, Logs::kFilteredErr);
  }

  // The rank's process, whose streams are attached to the session's output.
  Child start(int local);

 private:
  // Chooses a stream's way; `file` takes it, or a copy of it, and is none where none could be
  // opened.
  void direct(Target& target, int local, StreamChoice::Stream stream, const Fd& file);
  void attach(int local, bool is_error, Fd pipe, Fd file);
  // What stands before the rank's lines.
  std::string tag_of(int local) const;
  bool is_shown(int local) const {
    const auto& shown = options_.shown_ranks;
    return shown.empty() || std::find(shown.begin(), shown.end(), local) != shown.end();
  }

  Session& session_;
  const Options& options_;
  Plan& plan_;
  const Control& control_;
  const flight::Segment& flight_;
  std::vector<Logs::Files> files_;
  Writer::Shared filtered_out_, filtered_err_;  // none without filters
};

void Starter::direct(Target& target, int local, StreamChoice::Stream stream, const Fd& file) {
  const bool is_filtered =
      stream == StreamChoice::Out ? filtered_out_ != nullptr : filtered_err_ != nullptr;
  const bool tee = options_.tee.covers(local, stream) || is_filtered;  // it passes here
  if (options_.redirects.covers(local, stream) && !tee && file) {
    target = {Target::File, file.get()};
  } else if (plan_.world_size == 1 && !tee && is_shown(local) && options_.line_prefix.empty()) {
    // One rank is its program as if started by hand: a terminal stays a terminal, and nothing needs
    // a tag.
    target = {Target::Shared};
  }
}

std::string Starter::tag_of(int local) const {
  if (options_.line_prefix.empty()) return fmt::format("[rank {}] ", plan_.first_rank + local);
  return expanded(options_.line_prefix, {{"role_name", options_.role},
                                         {"local_rank", std::to_string(local)},
                                         {"rank", std::to_string(plan_.first_rank + local)},
                                         {"hostname", host_name()}});
}

void Starter::attach(int local, bool is_error, Fd pipe, Fd file) {
  const int rank = plan_.first_rank + local;
  Writer::Shared copy;
  if (file) {
    const std::string folder = session_.logs.of_rank(plan_.restarts, local);
    copy = std::make_shared<Writer::Target>(std::move(file),
                                            folder + (is_error ? Logs::kErr : Logs::kOut));
  }
  const auto stream = is_error ? StreamChoice::Err : StreamChoice::Out;
  const bool only_file =
      options_.redirects.covers(local, stream) && !options_.tee.covers(local, stream) && copy;
  session_.output.attach({.rank = rank,
                          .is_error = is_error,
                          .pipe = std::move(pipe),
                          .file = std::move(copy),
                          .shown = is_shown(local) && !only_file,
                          .tag = tag_of(local),
                          .filtered = is_error ? filtered_err_ : filtered_out_,
                          .filters = is_error ? options_.err_filters : options_.out_filters});
}

Child Starter::start(int local) {
  Variables variables = rank_variables(options_, plan_, local);
  variables[Control::kVariable] = std::to_string(control_.fd());
  variables[OrphanReaper::kVariable] = session_.mark;
  variables["LOCKSTEP_JOB_ID"] = plan_.job;
  variables[kJobKeyVariable] = hex_of(plan_.job_key);
  variables[flight::kVariable] = std::to_string(flight_.fd());
  if (files_[static_cast<size_t>(local)].has_folder) {
    variables["TORCHELASTIC_ERROR_FILE"] =
        session_.logs.of_rank(plan_.restarts, local) + Logs::kError;
  }
  ChildSpec spec;
  spec.path = session_.program;
  spec.command = options_.command;
  spec.cores = cores_of(options_.binding, local, plan_.local_ranks);
  spec.inherited = {control_.fd(), flight_.fd()};
  if (plan_.first_rank + local == 0 && may_read_input()) spec.input = ChildSpec::Input::Shared;
  if (plan_.listener) {
    variables["LOCKSTEP_STORE_FD"] = std::to_string(plan_.listener.get());
    spec.inherited.push_back(plan_.listener.get());
  }
  Logs::Files files = std::move(files_[static_cast<size_t>(local)]);
  direct(spec.out, local, StreamChoice::Out, files.out);
  direct(spec.err, local, StreamChoice::Err, files.err);
  // A rank whose output passes here sees a pipe. Files get what it writes as it is, so that such a
  // rank is told of no terminal.
  if (spec.out.kind == Target::Piped && !files.out && is_shown(local)) {
    const int columns = columns_behind(tag_of(local));
    if (columns > 0) variables["LOCKSTEP_COLUMNS"] = std::to_string(columns);
  }
  spec.environment = environment_with(variables);
  Child child = start_child(spec, session_.signals);
  // Rank 0 alone keeps the socket: when it ends, so does the port, and no peer waits for an answer
  // there.
  plan_.listener.reset();
  attach(local, false, std::move(child.out), std::move(files.out));
  attach(local, true, std::move(child.err), std::move(files.err));
  return child;
}

struct Opened {
  std::vector<Logs::Files> files;
  std::string problem;  // for which there are none
};

// A disk that is full by the time of a restart does not end the job.
Opened open_files(const Logs& logs, const Options& options, int restarts) {
  try {
    return {logs.open_all(options, restarts), ""};
  } catch (const ConfigError& error) {
    if (restarts == 0) throw;
    return {std::vector<Logs::Files>(static_cast<size_t>(options.ranks)), error.what()};
  }
}

}  // namespace

Outcome run_attempt(Session& session, Plan plan, Outside* outside) {
  std::vector<Logs::Files> files(static_cast<size_t>(plan.local_ranks));
  if (session.logs.is_on()) {
    // Shared, since the files may still be opened by the other thread after this one has stopped
    // waiting.
    const auto opened = std::make_shared<Opened>();
    Outcome early;
    const bool is_done = run_in_background(
        session, outside, early,
        [opened, logs = session.logs, options = session.options, restarts = plan.restarts] {
          *opened = open_files(logs, options, restarts);
        });
    if (!is_done) {
      for (const std::string& line : report(early)) session.output.say(line);
      return early;
    }
    if (!opened->problem.empty() && !std::exchange(session.has_said_no_files, true)) {
      session.output.say("restarts go on without log files: " + opened->problem);
    }
    files = std::move(opened->files);
  }
  Control control = Control::create(plan.local_ranks);
  const flight::Segment flight(plan.local_ranks);
  WorkerGroup worker_group(session, plan, control, flight, outside);
  Starter starter(session, plan, control, flight, std::move(files));
  try {
    for (int local = 0; local < plan.local_ranks; ++local) {
      Child child = starter.start(local);
      session.tell(
          fmt::format("started rank {} as process {}", plan.first_rank + local, child.pid));
      worker_group.watch(local, child.pid, std::move(child.starting));
    }
    return worker_group.run();
  } catch (...) {
    WorkerGroup::end_everything();
    throw;
  }
}

}  // namespace lockstep::launch
