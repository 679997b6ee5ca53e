// The launcher of one host of several: does what its node decides, with sockets, processes and a
// clock.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "launch/job/session.h"
#include "launch/rendezvous/meeting.h"
#include "launch/rendezvous/network/network.h"
#include "launch/rendezvous/node/node.h"
#include "launch/rendezvous/outside.h"
#include "launch/rendezvous/rendezvous.h"

namespace lockstep::launch {

class Agent : private Outside, private Network::Handler {
 public:
  Agent(Session& session, const Rendezvous& rendezvous, const Keys& keys, Meeting meeting);

  // Returns the launcher's exit status when the job has ended, here and, as far as this host can
  // tell, everywhere. Nothing when the program that held the port of the coordinator has gone
  // before this host has joined: this launcher may be the coordinator now.
  std::optional<int> run();

 private:
  // Outside's calls, while ranks run.
  std::optional<Outside::Clock::time_point> await(std::vector<pollfd>& events) override;
  std::optional<Order> attend() override;
  std::chrono::milliseconds patience() const override { return patience_; }
  void on_failure(const RankEnd& end) override;
  void on_stopped(int rank, int pid) override;
  void on_signal(int signal) override;
  void on_kill() override;

  // Network::Handler
  ConnectionId on_accept() override;
  void on_connect(ConnectionId link) override;
  void on_message(ConnectionId link, const MessagePtr& message) override;
  void on_close(ConnectionId link, bool refused) override;
  void on_refused_connection(const std::string& text) override;
  void on_disagreement(const std::string& text) override;

  // For `limit` at the latest.
  void wait_without_ranks(Outside::Clock::time_point limit);
  void on_signal_without_ranks(int signal);
  // Reads messages of the other launchers and acts on them.
  void go_on();
  void say_if_stopped();
  void run_ranks(const Launch& launch);
  void prepare_store();
  std::optional<Failure> failure_of(const Outcome& outcome) const;
  Failure failure_of(const RankEnd& end) const;
  Failure failure_of(int signal) const;
  void act();
  void perform(const Dial& dial);
  void perform(const Send& send) { network_.send(send.link, send.message); }
  void perform(const Hang& hang) { network_.hang_up(hang.link); }
  void perform(const Launch& launch);
  void perform(const Halt& halt) {
    halt_ = Order{halt.why, halt.signal};
    if (halt.signal != 0) signal_ = halt.signal;
  }
  void perform(const Say& say) { session_.output.say(say.text); }
  void perform(const Leave& leave) { leave_ = leave; }
  void perform(const MeetAgain&) { meets_again_ = true; }

  Session& session_;
  const Address own_;
  const std::string host_;
  const int max_restarts_;
  const std::chrono::milliseconds patience_, rejoin_;
  Outside::Clock::time_point due_ = Outside::Clock::time_point::max();  // the end of the last wait
  const Digest job_key_;
  Network network_;
  Fd store_;
  Node node_;
  std::optional<Launch> launch_;
  std::optional<Order> halt_;
  std::string said_;  // by the worker_group, why the attempt has ended
  std::optional<Leave> leave_;
  bool meets_again_ = false;
  bool asks_for_requeue_ = false;  // as the ranks of the last attempt here
  std::optional<int> signal_;      // to this launcher or another one, which ends the job
};

}  // namespace lockstep::launch
