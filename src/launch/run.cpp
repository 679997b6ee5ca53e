#include "lockstep/launch/run.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include "launch/child.h"
#include "launch/descendants.h"
#include "launch/environment.h"
#include "launch/host.h"
#include "launch/listener.h"
#include "launch/program.h"
#include "launch/supervisor.h"
#include "lockstep/core/environment.h"

namespace lockstep::launch {
namespace {

// With one of 0, 1, 2 closed the next descriptor we open would become somebody's stdout.
void open_standard_streams() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (fcntl(fd, F_GETFD) < 0) {
      [[maybe_unused]] const int opened = open("/dev/null", O_RDWR);  // the lowest free number: fd
    }
  }
}

void check(const Options& options) {
  if (options.command.empty()) {
    throw ConfigError("[run] no program given: lockstep run --nproc-per-node 2 PROGRAM ARGS");
  }
  if (options.ranks < 1)
    throw ConfigError(fmt::format("[run] {} ranks: need 1 or more", options.ranks));
}

// A Python rank 0 binds the port itself, so that it must be left free.
bool python_serves() { return env_text("LOCKSTEP_PYTHON_PEERS").value_or("0") != "0"; }

std::string options_threads(const Options& options) {
  const auto variables = rank_variables(options, 0, 0);
  const auto own = variables.find("OMP_NUM_THREADS");
  return own != variables.end() ? own->second : *env_text("OMP_NUM_THREADS");
}

}  // namespace

int run(const Options& given) {
  check(given);
  Options options = given;
  if (options.run_id.empty()) options.run_id = random_run_id();
  open_standard_streams();
  ChildSpec spec;
  spec.path = find_program(options.command.front());
  spec.command = options.command;
  // One rank is its program as if started by hand: a terminal stays a terminal, and nothing needs a
  // tag.
  spec.streams = options.ranks == 1 ? Streams::Shared : Streams::Piped;

  Listener listener = listen_on_loopback(options.master_port);
  if (python_serves()) listener.socket.reset();
  Control control = Control::create(options.ranks);
  adopt_orphans();
  Signals signals;
  Output output;
  Supervisor supervisor(options, signals, output, control);
  try {
    for (int rank = 0; rank < options.ranks; ++rank) {
      Variables variables = rank_variables(options, rank, listener.port);
      variables[Control::kVariable] = std::to_string(control.fd());
      spec.inherited = {control.fd()};
      spec.input = rank == 0 ? ChildSpec::Input::Shared : ChildSpec::Input::None;
      if (listener.socket) {
        variables["LOCKSTEP_STORE_FD"] = std::to_string(listener.socket.get());
        spec.inherited.push_back(listener.socket.get());
      }
      spec.environment = environment_with(variables);
      Child child = start_child(spec, signals);
      // Rank 0 alone keeps the socket: when it is gone, so is the port, and nobody waits for an
      // answer.
      listener.socket.reset();
      supervisor.watch(rank, child.pid);
      if (spec.streams == Streams::Piped) {
        output.attach(rank, std::move(child.out), std::move(child.err));
      }
    }
  } catch (...) {
    Supervisor::end_everything();
    throw;
  }
  return supervisor.run();
}

std::string describe(const Options& options) {
  check(options);
  const std::string where =
      options.master_port ? fmt::format(":{}", *options.master_port) : ", a free port";
  return fmt::format("{} rank{} on this host, OMP_NUM_THREADS={}, rank 0 at 127.0.0.1{}: {} {}",
                     options.ranks, options.ranks == 1 ? "" : "s", options_threads(options), where,
                     find_program(options.command.front()),
                     fmt::join(options.command.begin() + 1, options.command.end(), " "));
}

std::string describe_environment(const Options& given) {
  Options options = given;
  if (options.run_id.empty()) options.run_id = random_run_id();
  const uint16_t port = listen_on_loopback(options.master_port).port;
  std::string text;
  for (int rank = 0; rank < options.ranks; ++rank) {
    for (const auto& [name, value] : rank_variables(options, rank, port)) {
      text += fmt::format("rank {}: {}={}\n", rank, name, value);
    }
  }
  return text;
}

}  // namespace lockstep::launch
