#include "launch/incarnation.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>

#include "launch/binding.h"
#include "launch/child.h"
#include "launch/environment.h"
#include "launch/supervisor.h"
#include "lockstep/core/control.h"
#include "lockstep/core/flight.h"

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

std::string host_name() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

// Starts the ranks of one incarnation.
class Starter {
 public:
  Starter(Session& session, Plan& plan, const Control& control, const flight::Segment& flight)
      : session_(session),
        options_(session.options),
        plan_(plan),
        control_(control),
        flight_(flight) {}

  // Returns the rank's process; its streams are attached to the session's output.
  pid_t start(int local);

 private:
  // A stream's way, and the file that takes it or a copy of it.
  Fd direct(Target& target, int local, StreamChoice::Stream stream);
  void attach(int local, bool is_error, Fd pipe, Fd file);
  bool is_shown(int local) const {
    const auto& shown = options_.shown_ranks;
    return shown.empty() || std::find(shown.begin(), shown.end(), local) != shown.end();
  }

  Session& session_;
  const Options& options_;
  Plan& plan_;
  const Control& control_;
  const flight::Segment& flight_;
};

Fd Starter::direct(Target& target, int local, StreamChoice::Stream stream) {
  const bool tee = options_.tee.covers(local, stream);
  const bool redirect = options_.redirects.covers(local, stream) && !tee;
  Fd file;
  if (tee || redirect) {
    const char* name = stream == StreamChoice::Out ? "stdout.log" : "stderr.log";
    file = Logs::open_file(session_.logs.of_rank(plan_.restarts, local) + "/" + name);
  }
  if (redirect) {
    target = {Target::File, file.get()};
  } else if (plan_.world_size == 1 && !tee && is_shown(local) && options_.line_prefix.empty()) {
    // One rank is its program as if started by hand: a terminal stays a terminal, and nothing needs
    // a tag.
    target = {Target::Shared};
  }
  return file;
}

void Starter::attach(int local, bool is_error, Fd pipe, Fd file) {
  const int rank = plan_.first_rank + local;
  const auto tag = expanded(options_.line_prefix, {{"role_name", options_.role},
                                                   {"local_rank", std::to_string(local)},
                                                   {"rank", std::to_string(rank)},
                                                   {"hostname", host_name()}});
  session_.output.attach({.rank = rank,
                          .is_error = is_error,
                          .pipe = std::move(pipe),
                          .file = std::move(file),
                          .shown = is_shown(local),
                          .tag = tag});
}

pid_t Starter::start(int local) {
  Variables variables = rank_variables(options_, plan_, local);
  variables[Control::kVariable] = std::to_string(control_.fd());
  variables[Guard::kVariable] = session_.mark;
  variables[kJobKeyVariable] = hex_of(plan_.job_key);
  variables[flight::kVariable] = std::to_string(flight_.fd());
  if (session_.logs.is_on()) {
    variables["TORCHELASTIC_ERROR_FILE"] =
        session_.logs.of_rank(plan_.restarts, local) + "/error.json";
  }
  ChildSpec spec;
  spec.path = session_.program;
  spec.command = options_.command;
  spec.cores = cores_of(options_.binding, local, plan_.local_ranks);
  spec.inherited = {control_.fd(), flight_.fd()};
  if (plan_.first_rank + local == 0) spec.input = ChildSpec::Input::Shared;
  if (plan_.listener) {
    variables["LOCKSTEP_STORE_FD"] = std::to_string(plan_.listener.get());
    spec.inherited.push_back(plan_.listener.get());
  }
  spec.environment = environment_with(variables);
  Fd out_file = direct(spec.out, local, StreamChoice::Out);
  Fd err_file = direct(spec.err, local, StreamChoice::Err);
  Child child = start_child(spec, session_.signals);
  // Rank 0 alone keeps the socket: when it is gone, so is the port, and nobody waits for an answer.
  plan_.listener.reset();
  attach(local, false, std::move(child.out), std::move(out_file));
  attach(local, true, std::move(child.err), std::move(err_file));
  return child.pid;
}

}  // namespace

Outcome run_incarnation(Session& session, Plan plan, Outside* outside) {
  Control control = Control::create(plan.local_ranks);
  const flight::Segment flight(plan.local_ranks);
  Supervisor supervisor(session, plan, control, flight, outside);
  Starter starter(session, plan, control, flight);
  try {
    for (int local = 0; local < plan.local_ranks; ++local) {
      supervisor.watch(local, starter.start(local));
    }
  } catch (...) {
    Supervisor::end_everything();
    throw;
  }
  return supervisor.run();
}

}  // namespace lockstep::launch
