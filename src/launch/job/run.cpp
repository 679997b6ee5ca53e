#include "launch/job/run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "launch/diagnosis/failure_summary.h"
#include "launch/job/attempt.h"
#include "launch/job/program.h"
#include "launch/job/restarts.h"
#include "launch/output/logs.h"
#include "launch/process/environment.h"
#include "launch/process/secret.h"
#include "launch/rendezvous/meeting.h"
#include "launch/rendezvous/network/listening_socket.h"
#include "lockstep/core/environment.h"

namespace lockstep::launch {
namespace {

Plan plan_on_this_host(const Options& options) {
  Plan plan;
  plan.local_ranks = plan.world_size = options.ranks;
  return plan;
}

std::string options_threads(const Options& options) {
  const auto variables = rank_variables(options, plan_on_this_host(options), 0);
  const auto own = variables.find("OMP_NUM_THREADS");
  return own != variables.end() ? own->second : *env_text("OMP_NUM_THREADS");
}

// `where`: a description of the address at which rank 0 listens.
std::string describe_ranks(const Options& options, std::string_view where) {
  check(options);
  const auto arguments = options.command.begin() + 1;
  return fmt::format("{} rank{} on this host, OMP_NUM_THREADS={}{}: {}{}{}", options.ranks,
                     options.ranks == 1 ? "" : "s", options_threads(options), where,
                     find_program(options.command.front()),
                     arguments == options.command.end() ? "" : " ",
                     fmt::join(arguments, options.command.end(), " "));
}

// With its restarts.
int run_here(Session& session) {
  const Options& options = session.options;
  Restarts restarts(options.max_restarts);
  for (int count = 0;; ++count) {
    Plan plan = plan_on_this_host(options);
    plan.job = session.mark;
    plan.restarts = count;
    plan.max_restarts = options.max_restarts;
    ListeningSocket listening = listen_on_loopback(options.master_port);
    plan.master_port = listening.port;
    session.tell(fmt::format("rank 0 is to listen at 127.0.0.1:{}", listening.port));
    if (session.rank_0_binds_port) {
      listening.socket.reset();
    } else {
      plan.listener = std::move(listening.socket);
    }
    const Outcome outcome = run_attempt(session, std::move(plan));
    // The signal came after a failure, and prevents the restart.
    if (outcome.signal && outcome.cause && count < options.max_restarts) {
      session.drain(outcome.signal);
      return exit_code_of_signal(*outcome.signal);
    }
    const auto decision = restarts.after(outcome);
    if (!decision.text.empty()) session.output.say(decision.text);
    if (decision.pause) {
      const auto signal = session.pause(*decision.pause);
      if (!signal) continue;
      session.output.say(stopped_by(*signal));
      session.drain(signal);
      return exit_code_of_signal(*signal);
    }
    const auto signal = session.drain(outcome.signal);
    return signal && !outcome.asks_for_requeue() ? 128 + *signal : outcome.exit_code();
  }
}

}  // namespace

int run(const Options& options) {
  check(options);
  conceal("LOCKSTEP_TOKEN");  // one host needs none
  Session session(options);
  return session.run([&session] { return run_here(session); });
}

std::string describe(const Options& options) {
  return describe_ranks(options, options.master_port
                                     ? fmt::format(", rank 0 at 127.0.0.1:{}", *options.master_port)
                                     : ", rank 0 at 127.0.0.1, a free port");
}

std::string describe_on_hosts(const Options& options, const Rendezvous& rendezvous) {
  const std::string count =
      rendezvous.min_nodes == rendezvous.max_nodes
          ? std::to_string(rendezvous.max_nodes)
          : fmt::format("{} to {}", rendezvous.min_nodes, rendezvous.max_nodes);
  return fmt::format("one of {} hosts, whose launchers meet at {}; on this one:\n{}", count,
                     meeting_place(rendezvous).text(), describe_ranks(options, ""));
}

std::string describe_environment(const Options& given) {
  Options options = given;
  if (options.run_id.empty()) options.run_id = random_run_id();
  Plan plan = plan_on_this_host(options);
  plan.master_port = listen_on_loopback(options.master_port).port;
  std::string text;
  for (int rank = 0; rank < options.ranks; ++rank) {
    auto variables = rank_variables(options, plan, rank);
    // The folder's name is not known before it is made.
    if (Logs::are_asked_for(options)) variables.erase("TORCHELASTIC_ERROR_FILE");
    for (const auto& [name, value] : variables) {
      text += fmt::format("rank {}: {}={}\n", rank, name, value);
    }
  }
  return text;
}

}  // namespace lockstep::launch
