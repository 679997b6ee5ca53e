#include "launch/rendezvous/agent.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <random>

#include "core/control.h"
#include "core/security/job_secret.h"
#include "launch/job/attempt.h"
#include "launch/job/background.h"
#include "launch/job/late.h"
#include "launch/process/secret.h"
#include "launch/rendezvous/coordinator/job_spec.h"
#include "lockstep/core/preemption.h"

namespace lockstep::launch {
namespace {

using namespace std::chrono_literals;

Time now() { return std::chrono::steady_clock::now().time_since_epoch(); }

std::chrono::steady_clock::time_point point_of(Time time) {
  return std::chrono::steady_clock::time_point(time);
}

uint64_t random_number() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

NodeOptions node_options(const Session& session, const Rendezvous& rendezvous,
                         const Meeting& meeting, uint16_t store_port) {
  const Options& options = session.options;
  NodeOptions node;
  node.self = {.launcher = random_number(),
               .host = host_name(),
               .node_rank = rendezvous.node_rank.value_or(-1),
               .ranks = options.ranks,
               .address = meeting.own.host(),
               .job_spec = {.min_nodes = rendezvous.min_nodes,
                            .max_nodes = rendezvous.max_nodes,
                            .max_restarts = options.max_restarts,
                            .lease = rendezvous.heartbeat_timeout,
                            .grace = options.grace}};
  if (rendezvous.same_command) set_command(node.self.job_spec, options.command);
  node.timing.join = rendezvous.join_timeout;
  node.timing.last_call = rendezvous.last_call_timeout;
  node.timing.interval = rendezvous.keep_alive_interval;
  node.timing.lease = rendezvous.heartbeat_timeout;
  node.timing.rejoin = rendezvous.rejoin_timeout;
  node.timing.late = late_after();
  // What the worker group may take (docs/launching_protocol.md) and a second for a busy machine:
  // 0.8 s of telling, the grace, 2 s of killing.
  node.timing.stop = options.grace.value_or(1500ms) + 3800ms;
  node.timing.stop_after_signal = options.grace.value_or(10'000ms) + 3800ms;
  node.coordinator = meeting.coordinator;
  node.is_coordinator = meeting.is_coordinator;
  node.port_is_held = meeting.port_is_held;
  node.spares = rendezvous.spares;
  node.store_port = store_port;
  return node;
}

// rank 0's socket: as a program's own would be, it blocks.
Fd listen_for_store(const Address& own) {
  auto socket = listen_at(own.with_port(0), SOCK_NONBLOCK);
  if (!socket) {
    const int error = errno;
    throw Error(
        fmt::format("[run] no port to listen on at {}: {}", own.host(), std::strerror(error)));
  }
  fcntl(socket->get(), F_SETFL, 0);
  return std::move(*socket);
}

}  // namespace

Agent::Agent(Session& session, const Rendezvous& rendezvous, const Keys& keys, Meeting meeting)
    : session_(session),
      own_(meeting.own),
      host_(host_name()),
      max_restarts_(session.options.max_restarts),
      patience_(rendezvous.heartbeat_timeout / 4),
      rejoin_(rendezvous.rejoin_timeout),
      job_key_(keys.ranks),
      network_(std::move(meeting.socket), keys, rendezvous.heartbeat_timeout, *this),
      store_(listen_for_store(own_)),
      node_(node_options(session, rendezvous, meeting, local_address(store_.get()).port()), now()) {
}

std::optional<int> Agent::run() {
  act();
  while (!leave_) {
    if (meets_again_) return std::nullopt;
    if (launch_) {
      run_ranks(*std::exchange(launch_, std::nullopt));
    } else {
      wait_without_ranks(Outside::Clock::time_point::max());
    }
  }
  network_.finish(1s);
  if (!leave_->why.empty() && leave_->why != said_) session_.output.say(leave_->why);
  const auto signal = session_.drain(signal_);
  const bool by_signal = signal_ && leave_->status > 128;
  if (asks_for_requeue_ && (leave_->status == 0 || by_signal)) return kRequeueStatus;
  return signal ? 128 + *signal : leave_->status;
}

void Agent::wait_without_ranks(Outside::Clock::time_point limit) {
  std::vector<pollfd> events = {{session_.signals.fd(), POLLIN, 0}};
  session_.output.await(events);
  const auto until = std::min(limit, *Agent::await(events));
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Outside::Clock::now());
  poll(events.data(), events.size(), static_cast<int>(std::max<int64_t>(0, left.count())));
  session_.output.pump();
  while (const auto signal = session_.next_end()) on_signal_without_ranks(*signal);
  go_on();
}

void Agent::on_signal_without_ranks(int signal) {
  if (signal == SIGINT && signal_) {
    on_kill();  // other hosts still have ranks
  } else if (signal != SIGUSR1 || !node_.has_done()) {
    on_signal(signal);
  }
}

std::optional<Outside::Clock::time_point> Agent::await(std::vector<pollfd>& events) {
  network_.await(events);
  const auto next = point_of(node_.deadline(now()));
  const auto limit = network_.deadline();
  due_ = limit && *limit < next ? *limit : next;
  return due_;
}

// Hosts give each other up when one has been stopped, and each blames the network.
void Agent::say_if_stopped() {
  const auto late = Outside::Clock::now() - std::exchange(due_, Outside::Clock::time_point::max());
  if (late < 3 * patience_) return;
  session_.output.say(fmt::format(
      "this launcher did not run for {:.1f} s (stopped by scontrol suspend or Ctrl-Z?); hosts give "
      "each other up after {:g} s (--rdzv-conf heartbeat_timeout)",
      std::chrono::duration<double>(late).count(), seconds(4 * patience_)));
}

void Agent::go_on() {
  say_if_stopped();
  network_.pump();
  node_.tick(now());
  act();
}

std::optional<Outside::Order> Agent::attend() {
  go_on();
  return std::exchange(halt_, std::nullopt);
}

void Agent::act() {
  for (auto actions = node_.take_actions(); !actions.empty(); actions = node_.take_actions()) {
    for (const Action& action : actions) {
      std::visit([this](const auto& one) { perform(one); }, action);
    }
  }
}

void Agent::perform(const Dial& dial) {
  session_.tell("connecting to the launcher at " + dial.address);
  Outcome outcome;
  std::vector<Address> found;
  // A name server may take its time, and ranks are to be supervised meanwhile.
  if (!node_.has_ranks()) {
    found = resolve_in_background(session_, outcome, Endpoint::parse("address", dial.address, 0));
    node_.resolved(dial.link, now());
  }
  network_.dial(dial.link, dial.address, found);
  node_.missed(network_.misses());
  if (outcome.signal) on_signal_without_ranks(*outcome.signal);
}

void Agent::perform(const Launch& launch) {
  session_.tell(
      fmt::format("attempt {}: {} ranks on {} hosts, of which this one is number {}; rank 0 "
                  "listens at {}:{}",
                  launch.attempt - 1, launch.world_size, launch.nodes, launch.node_rank,
                  launch.master_addr, launch.master_port));
  launch_ = launch;
  halt_.reset();  // one that follows may come before the ranks have been started
}

void Agent::run_ranks(const Launch& launch) {
  Plan plan{.local_ranks = session_.options.ranks,
            .world_size = launch.world_size,
            .first_rank = launch.first_rank,
            .node_rank = launch.node_rank,
            .nodes = launch.nodes,
            .master_addr = with_interface_of(own_.host(), launch.master_addr),
            .master_port = launch.master_port,
            .job = fmt::format("{:016x}", launch.coordinator),
            .job_key = hmac(text_of(job_key_), {"attempt", std::to_string(launch.coordinator),
                                                std::to_string(launch.attempt)}),
            .restarts = static_cast<int>(launch.attempt) - 1,
            .max_restarts = max_restarts_};
  if (launch.node_rank == 0 && !session_.rank_0_binds_port) plan.listener = std::move(store_);
  store_.reset();
  said_.clear();
  asks_for_requeue_ = false;
  std::optional<Failure> failure;
  try {
    const Outcome outcome = run_attempt(session_, std::move(plan), this);
    if (!outcome.cause) said_ = outcome.outside.value_or("");
    asks_for_requeue_ = outcome.asks_for_requeue();
    failure = failure_of(outcome);
  } catch (const Error& error) {
    const auto* start = dynamic_cast<const StartError*>(&error);
    failure = Failure{.kind = Failure::Kind::Unstarted,
                      .rank = launch.first_rank,
                      .status = start != nullptr ? start->exit_code() : 1,
                      .what = fmt::format("{} cannot start its ranks: {}", host_, error.what())};
  }
  prepare_store();
  node_.ranks_over(failure, store_ ? local_address(store_.get()).port() : uint16_t{0}, now());
  act();
}

// A host that was cut off may have lost its address, too.
void Agent::prepare_store() {
  const auto until = Outside::Clock::now() + rejoin_;
  for (bool said = false; !node_.is_leaving() && !signal_; said = true) {
    try {
      store_ = listen_for_store(own_);
      return;
    } catch (const Error& error) {
      if (Outside::Clock::now() >= until) throw;
      if (!said) {
        session_.output.say(fmt::format("{}; trying for {:g} s (--rdzv-conf rejoin_timeout)",
                                        error.what(), seconds(rejoin_)));
      }
    }
    wait_without_ranks(Outside::Clock::now() + 500ms);
  }
}

std::optional<Failure> Agent::failure_of(const Outcome& outcome) const {
  if (outcome.signal) return failure_of(*outcome.signal);
  for (const RankEnd& end : outcome.ends) {
    if (end.rank == outcome.cause) return failure_of(end);
  }
  return std::nullopt;
}

Failure Agent::failure_of(const RankEnd& end) const {
  return {.kind = WIFSIGNALED(end.wait_status) ? Failure::Kind::Killed : Failure::Kind::Exited,
          .rank = end.rank,
          .status = exit_code_of(end.wait_status),
          .what = fmt::format("rank {} on {} {} after {:.2f} s (pid {})", end.rank, host_,
                              describe_exit(end.wait_status),
                              std::chrono::duration<double>(end.ran).count(), end.pid)};
}

Failure Agent::failure_of(int signal) const {
  return {.kind = Failure::Kind::Signalled,
          .status = exit_code_of_signal(signal),
          .what = fmt::format("the launcher on {} got {}", host_, signal_name(signal))};
}

void Agent::on_failure(const RankEnd& end) {
  node_.rank_failed(failure_of(end), now());
  act();
}

void Agent::on_stopped(int rank, int pid) {
  node_.remark(fmt::format("rank {} on {} is stopped (state T, pid {})", rank, host_, pid), now());
  act();
}

void Agent::on_signal(int signal) {
  if (signal != SIGUSR1) signal_ = signal;
  node_.interrupt(failure_of(signal), now());
  act();
}

void Agent::on_kill() {
  node_.interrupt({.kind = Failure::Kind::Signalled,
                   .status = 128 + SIGKILL,
                   .what = fmt::format("the launcher on {} was told to kill the ranks", host_)},
                  now());
  act();
}

ConnectionId Agent::on_accept() {
  session_.tell("a launcher has connected, which knows the token");
  return node_.accept(now());
}

void Agent::on_connect(ConnectionId link) {
  session_.tell("connected: both launchers know the token");
  node_.connected(link, now());
  act();
}

void Agent::on_message(ConnectionId link, const MessagePtr& message) {
  node_.receive(link, message, now());
  act();
}

void Agent::on_close(ConnectionId link, bool refused) {
  node_.missed(network_.misses());
  node_.closed(link, refused, now());
  act();
}

void Agent::on_refused_connection(const std::string& text) {
  node_.refused(text);
  act();
}

void Agent::on_disagreement(const std::string& text) {
  node_.obstructed(text);
  act();
}

namespace {

int run_here(Session& session, const Keys& keys, Rendezvous rendezvous) {
  const auto until = Outside::Clock::now() + rendezvous.join_timeout;
  for (;;) {
    Meeting meeting = prepare_meeting(rendezvous, session);
    std::optional<int> signal = meeting.signal;
    if (!signal) {
      const auto status = Agent(session, rendezvous, keys, std::move(meeting)).run();
      if (status) return *status;
      // Who holds a port need not listen there.
      signal = session.pause(200ms);
    }
    if (signal) {
      session.drain(signal);
      return exit_code_of_signal(*signal);
    }
    const auto left = until - Outside::Clock::now();
    rendezvous.join_timeout = std::max(1000ms, std::chrono::ceil<std::chrono::milliseconds>(left));
  }
}

// Node 0's launcher makes it, and serves it from now on; the others ask there. Nothing when a
// signal came first, which is in `outcome`.
std::optional<Token> exchanged_token(Session& session, const Rendezvous& rendezvous,
                                     std::optional<SecretServer>& server, Outcome& outcome) {
  const std::string& job = rendezvous.run_id;
  const uint16_t port = *rendezvous.secret_port;
  static constexpr const char* kAdvice =
      "; write export LOCKSTEP_TOKEN=$(openssl rand -hex 32) before srun";
  if (rendezvous.node_rank == 0) {
    const std::string secret = hex_of(random_bytes());
    try {
      server.emplace(port, job, secret);
    } catch (const Error& error) {
      throw ConfigError(fmt::format("[run] {}{}", error.what(), kAdvice));
    }
    session.tell(fmt::format("no LOCKSTEP_TOKEN: launchers of this user get one at port {}", port));
    return Token(secret);
  }
  const auto secret = std::make_shared<std::string>();
  const auto ask = [secret, host = meeting_place(rendezvous).host, port, job,
                    timeout = rendezvous.join_timeout] {
    try {
      *secret = ask_for_secret(host, port, job, timeout);
    } catch (const CommError& error) {
      throw ConfigError(fmt::format("[run] {}{}", error.what(), kAdvice));
    }
  };
  if (!run_in_background(session, nullptr, outcome, ask)) return std::nullopt;
  return Token(*secret);
}

}  // namespace

int run_on_hosts(const Options& given, const Rendezvous& rendezvous) {
  meeting_place(rendezvous);
  std::optional<Token> token;
  if (!rendezvous.secret_port) token = Token::from_env();
  conceal("LOCKSTEP_TOKEN");
  Options options = given;
  if (options.run_id.empty())
    options.run_id = rendezvous.run_id;  // a random one would differ on each host
  Session session(options);
  std::optional<SecretServer> server;
  return session.run([&] {
    Outcome outcome;
    if (!token) token = exchanged_token(session, rendezvous, server, outcome);
    if (outcome.signal) {
      session.drain(outcome.signal);
      return exit_code_of_signal(*outcome.signal);
    }
    Keys keys = Keys::of(*token, options.run_id);
    keys.use_tls = rendezvous.tls;
    return run_here(session, keys, rendezvous);
  });
}

}  // namespace lockstep::launch
